"""A proxy on loopback that harms HTTP on its way: delays, errors, cut connections, lost answers, damaged bodies.

``with Faulty(server.url, rule) as proxy`` is between a client, which uses ``proxy.url``, and a server. The Host header
goes through unchanged, so that signatures hold and a server that names itself names the proxy. As a program, so that it
has a separate processor: ``python -m tests.servers.faulty URL --latency 0.02 --seed 1 --lost 0.01 --status 0.02``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from urllib.parse import urlsplit

_PIECE = 256 << 10
_CODES = {409: "ConditionalRequestConflict", 412: "PreconditionFailed", 429: "TooManyRequests", 503: "SlowDown"}


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one request. Bytes are counted in bodies, from 0; at most one of these is set, beside ``delay``."""

    delay: float = 0.0
    """Seconds before anything else."""
    status: int | None = None
    """Answer so, and forward nothing."""
    code: str = ""
    """The error's name in that answer; empty for the usual one of the status."""
    json: bool = False
    """Whether that answer is JSON, as the Hub's are, instead of S3's XML."""
    cut_request: int | None = None
    """Forward so many bytes of the request's body, then reset both connections."""
    lost: bool = False
    """Let the server do the work, and reset the connection instead of passing on its answer."""
    cut_answer: int | None = None
    """Reset the connection after so many bytes of the answer's body."""
    short: int | None = None
    """Pass on so many bytes of the answer's body as if they were all of it."""
    flip: int | None = None
    """Change one bit of this byte of the answer's body."""


Rule = Callable[[str, str, int], Fault | None]
"""From the method, the target (path and query) and the number of the request, 1 for the first, to its fault."""


@dataclass(slots=True)
class Request:
    """One request that came by, and how far it came."""

    method: str
    target: str
    fault: Fault | None
    status: int = 0
    """Of the answer; 0 when there was none."""
    up: int = 0
    """Bytes of its body that were forwarded to the server."""
    down: int = 0
    """Bytes of the answer's body that the client was sent."""


def at_random(seed: int, lost: float = 0, status: float = 0, cut_request: float = 0, cut_answer: float = 0) -> Rule:
    """A schedule of faults with these probabilities for each request."""
    rng, guard = random.Random(seed), threading.Lock()

    def rule(method: str, target: str, number: int) -> Fault | None:
        with guard:
            dice, at, code = rng.random(), rng.randrange(1 << rng.randrange(1, 24)), rng.choice((500, 503, 429))
        for probability, fault in (
            (lost, Fault(lost=True)),
            (status, Fault(status=code)),
            (cut_request, Fault(cut_request=at)),
            (cut_answer, Fault(cut_answer=at)),
        ):
            if dice < probability:
                return fault
            dice -= probability
        return None

    return rule


class Faulty:
    """The proxy, on a free port of loopback, with a thread for each connection of a client."""

    def __init__(self, to: str, rule: Rule = lambda *_: None, latency: float = 0.0, port: int = 0) -> None:
        self.rule, self.latency = rule, latency
        """Both may be set while it runs."""
        self.requests: list[Request] = []
        server = urlsplit(to)
        self._server = (server.hostname or "127.0.0.1", server.port or 80)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._guard, self._open = threading.Lock(), set[socket.socket]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Faulty:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def count(self, method: str, part: str = "") -> int:
        """How many requests came with this method, and this in their target."""
        return sum(request.method == method and part in request.target for request in self.requests)

    # ---------------------------------------------------------------- inside

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection of a client, and the one to the server that belongs to it, for as many requests as come."""
        try:
            server = socket.create_connection(self._server, timeout=120)
        except OSError:
            _reset(client)
            return
        with self._guard:
            self._open |= {client, server}
        try:
            with client.makefile("rb") as from_client, server.makefile("rb") as from_server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while head := _head(from_client):
                    if not self._exchange(head, client, from_client, server, from_server):
                        break
        except OSError:  # an end that is gone, on purpose or not
            pass
        finally:
            with self._guard:
                self._open -= {client, server}
            _reset(client)
            server.close()

    def _exchange(
        self,
        head: _Head,
        client: socket.socket,
        from_client: BufferedReader,
        server: socket.socket,
        from_server: BufferedReader,
    ) -> bool:
        """One request and its answer; whether another may follow on these connections."""
        method, target, _ = head.first.split(" ", 2)
        with self._guard:
            fault = self.rule(method, target, len(self.requests) + 1)
            request = Request(method, target, fault)
            self.requests.append(request)
        fault = fault or Fault()
        time.sleep(self.latency + fault.delay)
        if head.fields.pop("expect", None):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.status is not None:
            for _ in head.body(from_client):
                pass
            request.status = fault.status
            client.sendall(_refusal(fault, method))
            return True
        if select.select([server], [], [], 0)[0]:
            return False  # the server has closed what it kept open: as if the client were connected to it
        if not _forward(fault, request, head, from_client, server):
            return False
        while (answer := _head(from_server)) is not None and answer.status in (100, 103):
            pass
        if answer is None:
            return False
        request.status = answer.status
        if method == "HEAD" or answer.status in (204, 304):
            if not fault.lost:
                client.sendall(answer.encoded())
            return not (fault.lost or answer.closes or head.closes)
        if fault.lost:
            for _ in answer.body(from_server):
                pass
            return False
        whole = _pass_back(fault, request, answer, from_server, client)
        return whole and not (answer.lasts_to_the_end or answer.closes or head.closes)


def _forward(fault: Fault, request: Request, head: _Head, from_client: BufferedReader, server: socket.socket) -> bool:
    """Send a request to the server; False if it was cut."""
    server.sendall(head.encoded())
    for piece in head.body(from_client):
        if fault.cut_request is not None and request.up + len(piece) >= fault.cut_request:
            server.sendall(head.framed(piece[: fault.cut_request - request.up]))
            request.up = fault.cut_request
            return False
        server.sendall(head.framed(piece))
        request.up += len(piece)
    server.sendall(head.end())
    return fault.cut_request is None


def _pass_back(
    fault: Fault, request: Request, answer: _Head, from_server: BufferedReader, client: socket.socket
) -> bool:
    """Send an answer to the client; False if it was cut or shortened."""
    length = answer.fields.get("content-length")
    if fault.short is not None and length is not None:
        shorter = (length[0], str(min(int(length[1]), fault.short)))
        client.sendall(_Head(answer.first, answer.fields | {"content-length": shorter}).encoded())
    else:
        client.sendall(answer.encoded())
    for piece in answer.body(from_server):
        end = request.down + len(piece)
        if fault.cut_answer is not None and end > fault.cut_answer:
            client.sendall(answer.framed(piece[: fault.cut_answer - request.down]))
            request.down = fault.cut_answer
            time.sleep(0.01)  # so that the reset does not overtake the bytes
            return False
        if fault.short is not None:
            piece = piece[: max(0, fault.short - request.down)]
            end = request.down + len(piece)
        if fault.flip is not None and request.down <= fault.flip < end:
            changed = bytearray(piece)
            changed[fault.flip - request.down] ^= 1
            piece = bytes(changed)
        client.sendall(answer.framed(piece))
        request.down = end
    client.sendall(answer.end())
    return fault.cut_answer is None


@dataclass(slots=True)
class _Head:
    """The first line and the fields of a message, by their names in small letters."""

    first: str
    fields: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.fields.get("transfer-encoding", ("", ""))[1].lower()

    @property
    def lasts_to_the_end(self) -> bool:
        """Whether the body of this answer ends with the connection."""
        return self.first.startswith("HTTP/") and not self.is_chunked and "content-length" not in self.fields

    @property
    def closes(self) -> bool:
        return "close" in self.fields.get("connection", ("", ""))[1].lower()

    def encoded(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.fields.values())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self.is_chunked and piece else piece

    def end(self) -> bytes:
        return b"0\r\n\r\n" if self.is_chunked else b""

    def body(self, source: BufferedReader) -> Iterator[bytes]:
        """The pieces of the body; of an answer without a length, all until the connection ends."""
        if self.is_chunked:
            while size := int(source.readline().split(b";")[0] or b"0", 16):
                yield from _exactly(source, size)
                source.readline()
            while source.readline().strip():
                pass  # trailers, which no server here sends
        elif "content-length" in self.fields:
            yield from _exactly(source, int(self.fields["content-length"][1]))
        elif self.lasts_to_the_end:
            while piece := source.read1(_PIECE):
                yield piece


def _head(source: BufferedReader) -> _Head | None:
    """None at the end of a connection."""
    line = source.readline().decode("latin-1")
    if not line.endswith("\r\n"):
        return None
    head = _Head(line.rstrip())
    while (line := source.readline().decode("latin-1")).strip():
        name, _, value = line.partition(":")
        head.fields[name.strip().lower()] = (name.strip(), value.strip())
    return head


def _exactly(source: BufferedReader, size: int) -> Iterator[bytes]:
    while size:
        piece = source.read1(min(size, _PIECE))
        if not piece:
            raise ConnectionError("a body ended early")
        yield piece
        size -= len(piece)


def _refusal(fault: Fault, method: str) -> bytes:
    assert fault.status is not None
    code = fault.code or _CODES.get(fault.status, "InternalError")
    if fault.json:
        kind, body = "application/json", json.dumps({"error": code}).encode()
    else:
        kind = "application/xml"
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a fault on purpose</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: {kind}\r\nX-Error-Code: {code}\r\n"
        f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    connection.close()


def main() -> None:
    """Print the URL and stand there until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", help="URL of the server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each request")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("lost", "status", "cut-request", "cut-answer"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="probability for each request")
    options = vars(parser.parse_args())
    to, port, latency = options.pop("to"), options.pop("port"), options.pop("latency")
    with Faulty(to, at_random(**options), latency, port) as proxy:
        print(proxy.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
