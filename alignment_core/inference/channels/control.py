"""Messages between a sender of weights and its receivers, over a socket each: whoever fails or dies ends the others' waits."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from alignment_core.errors import DeadlineExceeded, PeerFailed, first_line

OPEN_SECONDS = 60.0
"""Deadline of the connections of one channel."""
PROOF_SECONDS = 3
"""Time for a process to prove that it is of this run."""
POLL_SECONDS = 0.1
REASON_SECONDS = 1.0
"""Time for the reason of a failure to travel."""
Address = str | tuple[str, int]
"""Name of a Unix socket, or host and port."""


class Peers:
    """The other ends of a channel. Every wait for them has a deadline, and ends at once with PeerFailed if one fails or dies.

    A message is plain data for JSON; each peer's messages arrive in order.
    """

    def __init__(self, connections: Sequence[Connection], who: str, seconds: float) -> None:
        """``who`` names one of them in errors, and ``seconds`` is the deadline of a wait."""
        self.connections = connections
        self.who = who
        self.seconds = seconds
        self._received: dict[Connection, deque[Any]] = {connection: deque() for connection in connections}

    def send(self, message: Any) -> None:
        """Send a message to all."""
        self.send_each([message] * len(self.connections))

    def send_each(self, messages: Sequence[Any]) -> None:
        """Send each peer a message of its own."""
        for connection, message in zip(self.connections, messages, strict=True):
            try:
                connection.send_bytes(json.dumps(message).encode())
            except OSError:
                self.raise_reason()
                raise self._died() from None

    def receive(self) -> list[Any]:
        """Wait for the next message of every peer."""
        deadline = time.monotonic() + self.seconds
        while not all(self._received.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.who} did not answer within {self.seconds:g} seconds in a weight update "
                    "(resources.wait_timeout_seconds)"
                )
            self.check(left)
        return [messages.popleft() for messages in self._received.values()]

    def check(self, seconds: float = 0.0) -> None:
        """Wait up to so many seconds for any message. Raises PeerFailed if a peer failed."""
        for connection in wait(self.connections, seconds):
            assert isinstance(connection, Connection)
            try:
                message = json.loads(connection.recv_bytes())
            except (OSError, EOFError):
                raise self._died() from None
            if isinstance(message, dict) and "error" in message:
                raise PeerFailed(f"{self.who} failed in a weight update: {message['error']}")
            self._received[connection].append(message)

    def raise_reason(self) -> None:
        """Raise PeerFailed if a peer says soon why it fails, after messages that are on their way, or dies."""
        deadline = time.monotonic() + REASON_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            self.check(left)

    def _died(self) -> PeerFailed:
        return PeerFailed(f"{self.who} ended in the middle of a weight update")

    def fail(self, error: BaseException) -> None:
        """Tell all peers why this side gives up, and close."""
        data = json.dumps({"error": first_line(error)}).encode()
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(data)
                with socket.socket(fileno=os.dup(connection.fileno())) as half:
                    half.shutdown(socket.SHUT_WR)
        # A connection that is closed with messages unread may take with it what was sent last.
        deadline = time.monotonic() + REASON_SECONDS
        for connection in self.connections:
            with suppress(OSError, EOFError):
                while connection.poll(max(0.0, deadline - time.monotonic())):
                    connection.recv_bytes()
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self.connections:
            connection.close()


class Listener:
    """Accepts the receivers of a channel in a thread, so that they connect while the sender's process does other work."""

    def __init__(self, address: Address, count: int, key: bytes) -> None:
        """Accept ``count`` connections of processes that know ``key``. Port 0 stands for a free one."""
        self._socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._socket.bind(address)
        self._socket.listen(count)
        self._socket.settimeout(POLL_SECONDS)
        self.address: Address = self._socket.getsockname() if not isinstance(address, str) else address
        self._count = count
        self._key = key
        self._accepted: list[Connection] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="weight channel", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        deadline = time.monotonic() + OPEN_SECONDS
        with self._socket:
            while len(self._accepted) < self._count and time.monotonic() < deadline and not self._closed:
                try:
                    accepted, _ = self._socket.accept()
                    self._accepted.append(self._proved(accepted))
                except (OSError, EOFError, AuthenticationError):  # no connection yet, or of a stranger
                    continue

    def _proved(self, accepted: socket.socket) -> Connection:
        """The connection of a process that shows within a few seconds that it knows the key."""
        with accepted:
            connection = Connection(os.dup(accepted.fileno()))
            limit = threading.Timer(PROOF_SECONDS, accepted.shutdown, (socket.SHUT_RDWR,))
            limit.start()
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            except BaseException:
                connection.close()
                raise
            finally:
                limit.cancel()
                limit.join()  # before the socket is closed
        return connection

    def connections(self) -> list[Connection]:
        """Wait until all receivers have connected."""
        self._thread.join()
        if len(self._accepted) < self._count:
            raise DeadlineExceeded(
                f"{self._count - len(self._accepted)} of {self._count} engine workers did not connect to the channel for "
                f"weights within {OPEN_SECONDS:g} seconds"
            )
        return self._accepted

    def close(self) -> None:
        """Close all connections, and accept no more."""
        self._closed = True
        self._thread.join()
        for connection in self._accepted:
            connection.close()


def connect(address: Address, key: bytes) -> Connection:
    """Connect to the sender of a channel. Raises PeerFailed if its process has ended."""
    try:
        return Client(address, authkey=key)
    except (OSError, EOFError) as error:
        raise PeerFailed(f"the trainer's channel for weights is closed: {error}") from None
