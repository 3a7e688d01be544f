"""The server of the pages: started by `align ui`, or beside the services of `align up`."""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from contextlib import suppress

from alignment.flows.console import say
from alignment.flows.ui.guard import LOOPBACK, names_of_this_machine
from alignment.flows.ui.token import token
from alignment_core.artifacts import Store, open_store
from alignment_core.errors import AlignmentError, EnvironmentFault
from alignment_core.printable import printable

HOST = "127.0.0.1"
RETRY_SECONDS = 5.0
CLOSING_SECONDS = 1
"""Time for open requests, such as the events of a live run, when the server ends."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at once, at a free port if ``port`` is 0. Raises EnvironmentFault."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        at = f"--host {host}" if host != HOST and not port else f"--port {port}"
        raise EnvironmentFault(f"{at}: {error.strerror}; without it, a free port of loopback is taken") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in LOOPBACK


def serve(listener: socket.socket, store: Store, host: str = HOST) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    import uvicorn

    from alignment.flows.ui.app import application

    local = is_loopback(host)
    pages = application(store, token(), (*LOOPBACK, host) if local else names_of_this_machine(host), not local)
    config = uvicorn.Config(pages, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSING_SECONDS)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _serve_default_store(listener: socket.socket) -> None:
    """Serve the default store, and until it can be opened the reason why it cannot."""
    opened: list[Store] = []
    while not opened:
        try:
            opened.append(open_store(None, writes=False))
        except AlignmentError as error:
            say(f"the store cannot be opened; trying again in {RETRY_SECONDS:g} s: {error}")
            _answer_for_a_while(listener, f"the store cannot be opened: {error}\n")
    serve(listener, opened[0])


def _answer_for_a_while(listener: socket.socket, sentence: str) -> None:
    """Answer every request with a sentence, for some seconds."""
    body = printable(sentence).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}"
    until = time.monotonic() + RETRY_SECONDS
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(1.0)
                connection.recv(1 << 16)
                connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    listener.settimeout(None)


if __name__ == "__main__":  # with a socket of the supervisor, which keeps the port while this process is started again
    _serve_default_store(socket.socket(fileno=int(sys.argv[1])))
