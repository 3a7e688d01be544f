"""A real HTTP server that returns rewards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    """Answers with ``answer`` and records the requests. Port 0 is any free port."""

    request_queue_size = 256  # connections that come together would be repeated after seconds

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(content)
        self.server.tokens.add(self.headers["Authorization"])
        status, answer = self.server.answer(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def lengths(content: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(
        {"rewards": [len(completion) for completion in content["completions"]], "extra_logs": {}}
    ).encode()
