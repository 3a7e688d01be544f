"""A web server of files on loopback, over TLS: with or without ranges, and with ETags, dates or neither."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    """Serves ``files``, by path; ``requests`` are the methods, paths and ranges that it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.marks = "etag"
        """Its validators of a file's content: an ``etag``, a ``date`` or ``nothing``."""
        self.ranges = True
        self.says_so = True
        """Whether it declares that it has no ranges."""
        self.pause = 0.0
        """Seconds in the middle of each body."""
        self.broken_off = 0
        """So many of the next bodies end in their middle."""
        self.status: int | None = None
        """Of every answer, in place of 200."""
        self.requests: list[tuple[str, str, str]] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, requested_range = self.path.partition("?")[0], self.headers.get("Range", "")
        self.server.requests.append((self.command, self.path, requested_range))
        body = self.server.files.get(path)
        etag = f'"{hashlib.md5(body or b"").hexdigest()}"'
        wanted = self.headers.get("If-Match", etag)
        status = 404 if body is None else 412 if wanted != etag and self.server.marks == "etag" else 200
        status = self.server.status or status
        if status != 200 or body is None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", requested_range) if self.server.ranges else None
        part = body[int(span[1]) : int(span[2]) + 1] if span else body
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(body)}")
        if not self.server.ranges and self.server.says_so:
            self.send_header("Accept-Ranges", "none")
        if self.server.marks == "etag":
            self.send_header("ETag", etag)
        elif self.server.marks == "date":
            self.send_header("Last-Modified", formatdate(int.from_bytes(etag.encode()[1:4], "big") * 60, usegmt=True))
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            if self.server.broken_off:
                self.server.broken_off -= 1
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                return
            middle = len(part) // 2
            self.wfile.write(part[:middle])
            time.sleep(self.server.pause)
            self.wfile.write(part[middle:])


@contextmanager
def file_server(folder: Path) -> Iterator[FileServer]:
    """A server whose certificate is ``folder / "cert.pem"``, which clients have to trust (``SSL_CERT_FILE``)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(folder))
    server = FileServer()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _certificate(folder: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "cert.pem"
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
