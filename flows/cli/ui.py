"""`align ui`: pages over a store, in a local web server."""

from __future__ import annotations

import os
import socket
import threading
import webbrowser
from contextlib import closing, suppress
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json
from alignment_core.artifacts import open_store
from alignment_core.errors import EnvironmentFault

HOST = "127.0.0.1"


def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Browse artifacts in a web browser: what made them, what they touched, why they were promoted. Ctrl-C ends it."""
    import uvicorn

    from alignment.flows.ui.app import application

    opened = open_store(store, writes=False)
    with closing(_listening(port)) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        if as_json:
            print_json({"address": address, "store": opened.uri, "process": os.getpid()})
        else:
            out.print(f"{opened.uri} at {address}  (Ctrl-C ends it)", markup=False)
        config = uvicorn.Config(application(opened), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        if not no_open and not as_json and _has_browser():
            threading.Timer(0.5, webbrowser.open, [address]).start()
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    """A socket on the loopback interface, bound before the address is printed."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)  # before the address is printed, so that whoever reads it is answered
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"--port {port}: {error.strerror}; without it, a free port is taken") from None
    return listener


def _has_browser() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
