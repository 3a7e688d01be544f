"""A small Hub on loopback: the part of its HTTP interface that downloads use, over folders on disk."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree|paths-info)/(?P<rev>[^/?]+))?"
)
FILE = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>[^?]+)")


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[tuple[str, str], Path]
    requests: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(body=True, sent=sent)

    def _answer(self, body: bool, sent: bytes = b"") -> None:
        self.requests.append(self.path)
        if match := API.match(self.path):
            folder = self.repositories.get((match["kind"], match["repo"]))
            if folder is None:
                return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            return self._json(self._described(folder, match, sent), body)
        if match := FILE.match(self.path):
            kind = "datasets" if match["kind"] else "models"
            folder = self.repositories.get((kind, match["repo"]))
            file = folder / match["path"] if folder else None
            if folder is None or file is None or not file.is_file():
                return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound" if folder else "RepoNotFound"})
            content = file.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, body, {"ETag": f'"{tag}"', "X-Repo-Commit": commit_of(folder)})
        return self._send(404, b"", body, {})

    def _described(self, folder: Path, match: re.Match[str], sent: bytes) -> Any:
        names = sorted(path.name for path in folder.iterdir())
        entries = [
            {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40} for name in names
        ]
        if match["what"] == "tree":
            return entries
        if match["what"] == "paths-info":
            wanted = json.loads(sent)["paths"] if sent.startswith(b"{") else re.findall(r"paths=([^&]+)", sent.decode())
            return [entry for entry in entries if entry["path"] in wanted]
        return {
            "id": match["repo"],
            "sha": commit_of(folder),
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": name} for name in names],
        }

    def _json(self, content: Any, body: bool) -> None:
        self._send(200, json.dumps(content).encode(), body, {"Content-Type": "application/json"})

    def _send(self, code: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def commit_of(folder: Path) -> str:
    """A commit that follows from the folder's content."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def fake_hub(repositories: dict[tuple[str, str], Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders by ("models" or "datasets", "owner/name"); yields the endpoint and the list of requested paths."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
