"""``align chat`` with servers that stream as OpenAI's API does."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.align import align_here


class Echo(BaseHTTPRequestHandler):
    """Answers with how many messages it was sent, and the last one, word by word."""

    server: Any

    def do_GET(self) -> None:
        if self._is_refused():
            return
        self._send(json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        self.server.requests.append(content)
        if "fail" in content["messages"][-1]["content"]:
            self.send_response(400)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"too bad")
            return
        if self.server.stream:
            self._send(self.server.stream)
            return
        words = [f"{len(content['messages'])}:", *content["messages"][-1]["content"].split(" ")]
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self._send("".join(lines).encode())

    def _is_refused(self) -> bool:
        """Whether the request lacks the server's token, if it has one."""
        token = self.server.token
        if token is None or self.headers["Authorization"] == f"Bearer {token}":
            return False
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Any]:
    running: Any = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    running.requests, running.token, running.models, running.stream = [], None, ["echo"], b""
    running.url = f"http://127.0.0.1:{running.server_port}/v1"
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def chat(lines: str, *arguments: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return align_here(tmp_path, "chat", *arguments)

    return chat


def test_chat_sends_the_history_until_reset(server: Any, says: Any) -> None:
    done = says(
        "hello there\n\nagain\n/reset\nanew\n/quit\nnever\n", server.url, "--system", "be brief", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == ["2: hello there", "4: again", "2: anew"]
    second = server.requests[1]
    assert second["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "2: hello there "},
        {"role": "user", "content": "again"},
    ]
    assert (second["model"], second["stream"], second["temperature"]) == ("echo", True, 0)


def test_two_models_get_the_same_prompts_and_keep_their_own_history(server: Any, says: Any) -> None:
    other = f"{server.url}/"
    done = says("one\ntwo\n", server.url, other, "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"prompt": word, "answers": {server.url: f"{count}: {word} ", other: f"{count}: {word} "}}
        for word, count in (("one", 1), ("two", 3))
    ]
    shown = says("one\n", server.url, other).stdout
    assert f"[{server.url}]" in shown
    assert shown.count("1: one") == 2


def test_answers_may_contain_unicode_line_separators(server: Any, says: Any) -> None:
    text = "two\u2028lines\u2029and\u0085more"
    done = says(f"{text}\n", server.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"prompt": text, "answers": {server.url: f"1: {text} "}}


def test_a_server_gets_the_token_of_the_variable(server: Any, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "s3cret"
    monkeypatch.setenv("CHAT_TOKEN", "s3cret")
    assert "1: hi" in says("hi\n", server.url, "--token-variable", "CHAT_TOKEN").stdout
    done = says("hi\n", server.url)
    assert (done.returncode, "answered 401; --token-variable names the variable with its token" in done.stderr) == (
        3,
        True,
    )
    done = says("hi\n", server.url, "--token-variable", "NONE")
    assert (done.returncode, "the environment has no variable NONE" in done.stderr) == (2, True)


def test_an_unreachable_server_exits_with_the_code_of_the_environment(server: Any, says: Any) -> None:
    done = says("fail\n", server.url)
    assert (done.returncode, "answered 400: too bad" in done.stderr) == (3, True), done.stderr
    done = says("hi\n", "http://127.0.0.1:1/v1")
    assert (done.returncode, "no OpenAI-compatible server answers there" in done.stderr) == (3, True)
    assert says("hi\n", "a", "b", "c").returncode == 2
    assert says("hi\n", "./no-such-folder").returncode == 2


def events(*chunks: dict[str, Any], field: str = "data: ") -> bytes:
    return "".join(f"{field}{json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"


def piece(finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_a_request_that_fails_during_its_stream_is_an_error(server: Any, says: Any) -> None:
    """As vLLM ends the stream of a request that failed in its engine: status 200, an error, and then `[DONE]`."""
    error = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
    server.stream = events(piece(content="Half of the "), error)
    done = says("hi\n", server.url)
    assert done.returncode == 3
    assert "failed during the answer: EngineCore encountered an issue" in done.stderr


@pytest.mark.parametrize(
    ("chunks", "answer", "note"),
    [
        ([piece(content="Half"), piece("length")], "Half", "cut off at --max-tokens 8"),
        ([piece(reasoning="Hm"), piece("stop")], "", "only reasoning, and no answer"),
        ([piece(reasoning="Hm"), piece("length")], "", "only reasoning, and no answer, cut off at --max-tokens 8"),
        ([piece(reasoning="Hm"), piece(content="Yes"), piece("stop")], "Yes", None),
    ],
)
def test_an_incomplete_answer_is_marked(
    chunks: list[dict[str, Any]], answer: str, note: str | None, server: Any, says: Any
) -> None:
    server.stream = events(*chunks)
    shown = says("hi\n", server.url, "--max-tokens", "8")
    assert (shown.stdout.strip(), bool(note) and note in shown.stderr) == (answer, bool(note))
    answers = json.loads(says("hi\n", server.url, "--max-tokens", "8", "--json").stdout)
    assert answers == {"prompt": "hi", "answers": {server.url: answer}} | (
        {"notes": {server.url: note}} if note else {}
    )


def test_events_may_lack_the_space_behind_their_field(server: Any, says: Any) -> None:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html: "if value starts with a U+0020 SPACE, remove it"."""
    server.stream = events(piece(content="Yes"), field="data:")
    assert says("hi\n", server.url).stdout.strip() == "Yes"


def test_the_model_of_a_server_with_several_is_named(server: Any, says: Any) -> None:
    server.models = ["base", "adapter"]
    assert f"{server.url}: base answers, the first of its 2 models" in says("hi\n", server.url).stderr
    assert server.requests[0]["model"] == "base"


def test_a_model_is_served_with_its_code_and_stops_where_engines_do(
    server: Any, says: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trusted: list[bool] = []

    @contextmanager
    def served(*_: Any, trust_remote_code: bool, **__: Any) -> Iterator[Any]:
        trusted.append(trust_remote_code)
        yield SimpleNamespace(url=server.url, token=None, shortened=None, context=64, stop_ids=(5, 7))

    monkeypatch.setattr("alignment.flows.cli.chat.served", served)
    assert says("hi\n", str(tmp_path), "--trust-remote-code").returncode == 0
    assert says("hi\n", str(tmp_path)).returncode == 0
    assert trusted == [True, False]
    assert server.requests[0]["stop_token_ids"] == [5, 7]
    says("hi\n", server.url)
    assert "stop_token_ids" not in server.requests[-1], "other servers may refuse it"


def test_models_of_this_machine_share_its_gpu(
    server: Any, says: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[float] = []

    @contextmanager
    def served(_: str, name: str, resources: Any, **__: Any) -> Iterator[Any]:
        given.append(resources.gpu_memory_utilization)
        yield SimpleNamespace(url=server.url, token=None, shortened=None, context=64, stop_ids=())

    monkeypatch.setattr("alignment.flows.cli.chat.served", served)
    other = tmp_path / "other"
    other.mkdir()
    assert says("hi\n", str(tmp_path), server.url).returncode == 0
    assert says("hi\n", str(tmp_path), str(other)).returncode == 0
    assert given == [0.9, 0.45, 0.45]
