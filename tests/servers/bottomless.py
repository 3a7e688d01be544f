"""An S3 server that accepts large objects of zeros and keeps only their sizes: for uploads and downloads larger than
the memory of test machines. ``python -m tests.servers.bottomless`` prints its URL."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import uuid
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

_ZEROS = bytes(1 << 20)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    small: dict[str, bytes] = {}
    large: dict[str, int] = {}
    uploads: dict[str, dict[int, int]] = {}
    guard = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_PUT(self) -> None:
        key, query, size = *self._asked(), int(self.headers["Content-Length"])
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        if "partNumber" not in query:
            body = self.rfile.read(size)
            with self.server.guard:
                there = key in self.server.small
                old = _etag(self.server.small[key]) if there else None
                lost = there if self.headers.get("If-None-Match") else self.headers.get("If-Match", old) != old
                if not lost:
                    self.server.small[key] = body
            self._answer(412 if lost else 200, _error("PreconditionFailed") if lost else b"", ETag=_etag(body))
            return
        left = size
        while left:
            left -= len(self.rfile.read(min(left, len(_ZEROS))))
        self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = size
        self._answer(200, ETag='"zeros"')

    def do_POST(self) -> None:
        key, query = self._asked()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = {}
            self._answer(200, _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"))
        else:
            self.server.large[key] = sum(self.server.uploads.pop(query["uploadId"][0]).values())
            self._answer(200, _xml("CompleteMultipartUploadResult", "<ETag>&quot;zeros&quot;</ETag>"))

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        self.server.small.pop(key, None)
        self.server.large.pop(key, None)
        self._answer(204)

    def do_GET(self) -> None:
        key, query = self._asked()
        if "uploads" in query:
            self._answer(200, _xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>"))
        elif "list-type" in query:
            self._answer(200, self._listing(query.get("prefix", [""])[0]))
        elif key in self.server.large:
            first, last = 0, self.server.large[key] - 1
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(span[1]), min(int(span[2]), last)
            whole = self.server.large[key]
            self._answer(206, None, last + 1 - first, ETag='"zeros"', Content_Range=f"bytes {first}-{last}/{whole}")
            for at in range(first, last + 1, len(_ZEROS)) if self.command == "GET" else ():
                self.wfile.write(_ZEROS[: last + 1 - at])
        elif key in self.server.small:
            body = self.server.small[key]
            self._answer(200, body, ETag=_etag(body))
        else:
            self._answer(404, _error("NoSuchKey"))

    do_HEAD = do_GET

    def _listing(self, prefix: str) -> bytes:
        names = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(body)}</Size><LastModified>2026-11-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{_etag(body)[1:-1]}&quot;</ETag></Contents>"
            for key, body in sorted(self.server.small.items())
            if key.startswith(prefix)
        )
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{names}")

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return parts.path.removeprefix("/bucket/"), parse_qs(parts.query, keep_blank_values=True)

    def _answer(self, status: int, body: bytes | None = b"", length: int = 0, **fields: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time.time(), usegmt=True))
        self.send_header("Last-Modified", formatdate(time.time(), usegmt=True))
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length if body is None else len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def _xml(name: str, content: str) -> bytes:
    return f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'.encode()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code></Error>".encode()


if __name__ == "__main__":
    server = _Server(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
