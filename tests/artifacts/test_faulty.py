"""The proxy of the fault tests applies its rule, and passes on other requests unchanged."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.servers.faulty import Fault, Faulty, at_random

BODY = bytes(range(256)) * 4096


class Echo(BaseHTTPRequestHandler):
    """Answers PUT with the length of the received body, GET with ``BODY``: chunked below /chunked."""

    protocol_version = "HTTP/1.1"
    done: list[tuple[str, int]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
            return
        self.send_header("Content-Length", str(len(BODY)))
        self.send_header("X-Host", self.headers["Host"])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) < int(self.headers["Content-Length"]):
            self.close_connection = True
            return
        self.done.append((self.path, len(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Echo.done.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def connected(proxy: Faulty) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)


def test_without_a_fault_all_passes_over_one_connection(echo: str) -> None:
    with Faulty(echo) as proxy:
        client = connected(proxy)
        for method, path, sent in (
            ("GET", "/", b""),
            ("PUT", "/one?x=1", BODY),
            ("GET", "/chunked", b""),
            ("HEAD", "/", b""),
        ):
            client.request(method, path, sent)
            mine = client.sock.getsockname() if client.sock else None
            answer = client.getresponse()
            assert answer.status == 200
            assert answer.read() == (BODY if method == "GET" else b"")
            assert answer.headers.get("X-Host", client.host) in (client.host, proxy.url.removeprefix("http://"))
            assert client.sock is not None
            assert client.sock.getsockname() == mine, "the connection is kept"
        assert [(request.status, request.up, request.down) for request in proxy.requests] == [
            (200, 0, len(BODY)),
            (200, len(BODY), 0),
            (200, 0, len(BODY)),
            (200, 0, 0),
        ]


def test_each_fault_has_the_effect_of_its_name(echo: str) -> None:
    faults: list[Fault | None] = []
    with Faulty(echo, lambda method, target, number: faults.pop()) as proxy:

        def meets(fault: Fault | None, method: str = "GET", sent: bytes = b"") -> tuple[int, bytes]:
            faults.append(fault)
            client = connected(proxy)
            client.request(method, "/", sent)
            answer = client.getresponse()
            return answer.status, answer.read()

        status, body = meets(Fault(status=503))
        assert (status, b"<Code>SlowDown</Code>" in body) == (503, True)
        assert meets(Fault(status=409, code="taken", json=True)) == (409, b'{"error": "taken"}')
        assert meets(Fault(short=1000)) == (200, BODY[:1000])
        flipped = meets(Fault(flip=300_000))[1]
        assert [at for at, (left, right) in enumerate(zip(flipped, BODY, strict=True)) if left != right] == [300_000]
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            meets(Fault(cut_answer=5000))
        assert proxy.requests[-1].down == 5000
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            meets(Fault(lost=True), "PUT", BODY)
        assert Echo.done == [("/", len(BODY))]
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            meets(Fault(cut_request=1234), "PUT", BODY)
        assert proxy.requests[-1].up == 1234
        assert meets(None, "PUT", BODY) == (200, b"")
        assert len(Echo.done) == 2, "an interrupted request had no effect"


def test_a_random_schedule_is_the_same_for_the_same_seed() -> None:
    first, same, other_seed = (at_random(seed, lost=0.2, status=0.2, cut_answer=0.1) for seed in (1, 1, 2))
    drawn = [[rule("GET", "/", number) for number in range(200)] for rule in (first, same, other_seed)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert 60 < sum(fault is not None for fault in drawn[0]) < 140


def test_the_faulty_proxy_runs_as_a_program(echo: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.servers.faulty", echo, "--status", "1"], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        client = http.client.HTTPConnection(program.stdout.readline().strip().removeprefix("http://"), timeout=30)
        client.request("GET", "/")
        assert client.getresponse().status in (429, 500, 503)
        program.terminate()
