"""Waiting for a server to answer: the wait is shown and used, and a server with a certificate is reached, too."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.errors import EnvironmentFault
from alignment_core.inference import http_server
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.kinds import served_judge

SERVER = """
import http.server, json, ssl, sys, time

class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"max_model_len": 48}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

time.sleep(1)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Models)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
"""Answers after a second as vLLM's server does once its model is loaded."""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def test_no_other_process_is_given_the_port_while_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge failed to start because its port, free a moment before, was another server's by then."""
    given: list[tuple[str, int]] = []

    def running(folder: str, name: str, host: str, port: int, *_: Any, **__: Any) -> Any:
        given.append((host, port))
        return nullcontext()

    monkeypatch.setattr(http_server, "running", running)
    with http_server.served("folder", "judge"), socket.socket() as other, socket.socket() as server:
        (address,) = given
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(address)
        http_server._check_free(*address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM's does
        server.bind(address)
        server.listen()


def test_a_server_that_is_still_loading_its_model_is_reported(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LOADING_SECONDS", 0.3)
    monkeypatch.setattr(http_server, "server_of", lambda *_: ([sys.executable, "-c", SERVER, str(port)], {}))
    seconds: list[float] = []
    with http_server.running("folder", "name", "127.0.0.1", port, on_loading=seconds.append) as server:
        assert server.url == f"http://127.0.0.1:{port}/v1"
        assert server.context == 48
    assert 0.3 <= seconds[0] < seconds[1]


def test_stop_tokens_are_read_while_the_server_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of this test loads until they have been read."""
    read = tmp_path / "read"

    def stop_ids(*_: Any) -> tuple[int, ...]:
        read.touch()
        return (7,)

    loads = f"import os, time\nwhile not os.path.exists({str(read)!r}): time.sleep(0.05)\n"
    monkeypatch.setattr(http_server, "stop_ids", stop_ids)
    monkeypatch.setattr(http_server, "server_of", lambda *of: ([sys.executable, "-c", loads + SERVER, str(of[3])], {}))
    with http_server.served(str(tmp_path), "name") as server:
        assert server.stop_ids == (7,)


def test_the_reason_of_a_server_that_fails_precedes_that_of_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_ids(*_: Any) -> tuple[int, ...]:
        raise RuntimeError("no such tokenizer")

    code = "raise ValueError('no such model')"
    monkeypatch.setattr(http_server, "stop_ids", stop_ids)
    monkeypatch.setattr(http_server, "server_of", lambda *_: ([sys.executable, "-c", code], {}))
    with (
        pytest.raises(EnvironmentFault, match=r"^name: vLLM's server did not start: ValueError: no such model"),
        http_server.served(str(tmp_path), "name"),
    ):
        pass


def test_a_judge_may_load_as_long_as_the_recipe_waits_for_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """72B parameters take longer than ten minutes from a network's disk; the death of the server is noticed at once."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(http_server, "server_of", lambda *_: (command, {}))
    opening: Any = SimpleNamespace(
        model=SimpleNamespace(path=tmp_path, trust_remote_code=False),
        starting=lambda _: nullcontext(),
        resources=ResourcesConfig(wait_timeout_seconds=0.5),
    )
    with pytest.raises(EnvironmentFault, match=r"did not answer within 0\.5 seconds"):
        served_judge.REWARD.open(SimpleNamespace(), opening)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_with_its_own_certificate_is_reached_by_https(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    files = ["-keyout", key, "-out", certificate, "-subj", "/CN=another.example", "-days", "2"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files], check=True, capture_output=True
    )
    command = [sys.executable, "-c", SERVER, str(port), certificate, key]
    monkeypatch.setattr(http_server, "server_of", lambda *_: (command, {}))
    options = [f"--ssl-keyfile={key}", f"--ssl-certfile={certificate}"]
    with http_server.running("folder", "name", "127.0.0.1", port, options=options, start_seconds=20) as server:
        assert server.url == f"https://127.0.0.1:{port}/v1"
        assert server.context == 48
