"""An HTTP proxy that records every request that reaches it, and answers 502 to each or passes them on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RecordingProxy(ThreadingHTTPServer):
    """``requests`` are ``(method, target)``: the target of CONNECT is ``host:port``, that of other methods a whole URL."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def variables(self) -> dict[str, str]:
        """What sends a process here, whatever library it uses."""
        names = ("http_proxy", "https_proxy", "all_proxy")
        return {spelling: self.url for name in names for spelling in (name, name.upper())}


class _Handler(BaseHTTPRequestHandler):
    server: RecordingProxy

    def handle_one_request(self) -> None:
        """Any method."""
        self.raw_requestline = self.rfile.readline(65537)
        self.close_connection = True
        if self.raw_requestline and self.parse_request():
            self.server.requests.append((self.command, self.path))
            self.send_error(502)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def recording_proxy() -> Iterator[RecordingProxy]:
    """One that listens for as long as the context lasts."""
    proxy = RecordingProxy()
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
