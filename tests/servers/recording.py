"""An HTTP proxy that records every request that reaches it; it answers 502, except for hosts with a configured address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class RecordingProxy(ThreadingHTTPServer):
    """``requests`` are ``(method, target)``: the target of CONNECT is ``host:port``, that of other methods a whole URL."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str]] = []
        self.ports: dict[str, int] = {}
        """Ports of loopback that stand for hosts."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def variables(self) -> dict[str, str]:
        """Variables that send a process's requests here, with any library."""
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
            port = self.server.ports.get(urlsplit(self.path).hostname or "")
            self._pass_on(port) if port else self.send_error(502)

    def _pass_on(self, port: int) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        target = HTTPConnection("127.0.0.1", port, timeout=60)
        target.request(
            self.command, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, dict(self.headers)
        )
        answer = target.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection")
        }
        length = {} if self.command == "HEAD" else {"Content-Length": str(len(content))}
        for name, value in {**kept, **length, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

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
