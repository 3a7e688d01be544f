"""`align ui`: pages over a store, in a local web server."""

from __future__ import annotations

import os
import threading
import webbrowser
from contextlib import closing
from html import escape
from typing import Annotated

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json, write_file
from alignment.flows.ui.token import token, token_file
from alignment_core.artifacts import open_store


def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; beyond loopback everything needs the token.")
    ] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Browse artifacts, runs and nights in a web browser, and label pairs of completions. Ctrl-C ends it."""
    from alignment.flows.ui.server import listening, serve

    opened = open_store(store, writes=False)
    secret = token()
    with closing(listening(host, port)) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        if as_json:
            print_json(
                {"address": address, "store": opened.uri, "process": os.getpid(), "token_file": str(token_file())}
            )
        else:
            out.print(f"{opened.uri} at {address}  (Ctrl-C ends it)", markup=False)
            out.print(f"Changes ask for the token in {token_file()}", markup=False)
        if not no_open and not as_json and _has_browser():
            threading.Timer(0.5, _open, [address, secret]).start()
        serve(listener, opened, host)


def _open(address: str, secret: str) -> None:
    """Open a browser that is signed in. Its command line names a file, since others can read command lines."""
    page = token_file().with_name("open.html")
    target = escape(f"{address}?token={secret}")
    write_file(page, f'<!doctype html><title>align</title><meta http-equiv="refresh" content="0; url={target}">')
    page.chmod(0o600)
    webbrowser.open(page.as_uri())


def _has_browser() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
