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
    pages = application(store, token(), LOOPBACK if local else names_of_this_machine(host), not local)
    config = uvicorn.Config(pages, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSING_SECONDS)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _opened() -> Store:
    """The default store, as soon as it can be opened."""
    last = ""
    while True:
        try:
            return open_store(None, writes=False)
        except AlignmentError as error:
            if str(error) != last:
                say(f"the store cannot be opened; trying again every {RETRY_SECONDS:g} s: {error}")
            last = str(error)
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":  # with a socket of the supervisor, which keeps the port while this process is started again
    serve(socket.socket(fileno=int(sys.argv[1])), _opened())
