"""OpenLineage's events while a run goes on: to a file, and to servers on loopback that answer, are slow, refuse or die."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from alignment_core import credentials
from alignment_core.artifacts import Reference
from alignment_core.errors import NumericError, Stopped, UserError
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.journal import RunRecord, new_record
from alignment_core.tracking import listening, openlineage
from alignment_core.tracking.openlineage import OpenLineageEvents
from tests.tracking.watched import recipe_with, result

RUN = "0eb1c584-1111-4111-8111-111111111111"
ROWS, MODEL = Reference("dataset", "2" * 64), Reference("model", "0" * 64)
FACETS = {
    "additionalProperties": {
        "type": "object",
        "required": ["_producer", "_schemaURL"],
        "properties": {
            "_producer": {"pattern": "^[a-z]+:"},
            "_schemaURL": {"pattern": r"^https://openlineage\.io/spec/.+#/\$defs/\w+$"},
        },
    }
}
NAMED = {"required": ["namespace", "name"], "properties": {"name": {"type": "string"}, "facets": FACETS}}
EVENT = {
    "required": ["eventTime", "eventType", "run", "job", "producer", "schemaURL"],
    "properties": {
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "eventTime": {"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$"},
        "run": {
            "required": ["runId"],
            "properties": {"runId": {"pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}, "facets": FACETS},
        },
        "job": NAMED,
        "inputs": {"type": "array", "items": NAMED},
        "outputs": {"type": "array", "items": NAMED},
        "producer": {"pattern": "^[a-z]+:"},
        "schemaURL": {"const": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"},
    },
}
"""What the specification requires of a run event."""


def run(attempt: int = 1) -> RunRecord:
    return new_record(RUN, "small", {}, "s3://bucket/store").model_copy(update={"attempt": attempt})


def call(label: str = "sft", **inputs: Reference) -> StageCall:
    return StageCall(stage="sft", label=label, config={}, inputs=inputs or {"train": ROWS})


def cached(label: str) -> StageResult:
    return result(label).model_copy(update={"state": "cached", "reason": "same key", "key": "3" * 64})


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines if line]
    for event in events:
        jsonschema.validate(event, EVENT)
    return events


def states(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["job"]["name"], event["eventType"]) for event in events]


def send(target: object, folder: Path, events: Callable[[Any], None], attempt: int = 1) -> list[str]:
    """Open a run's trackers, pass events, close them; returns the warnings."""
    warnings: list[str] = []
    opening = {"OpenLineage": lambda: OpenLineageEvents(str(target), run(attempt), folder, warnings.append)}
    with listening(opening, warnings.append) as (listener,):
        events(listener)
    return warnings


def one_stage(listener: Any, label: str = "sft", **metrics: Any) -> None:
    listener.requested(call(label), "1" * 64)
    listener.started(label)
    listener.produced(result(label, **metrics))
    listener.finished(result(label, **metrics))


def test_a_stage_that_runs_has_a_start_and_a_completion_with_datasets_and_metrics(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"loss": 0.5, "gap": float("nan"), "flag": True, "warnings": ["x"]}
    assert send(tmp_path / "new" / "events.ndjson", tmp_path, lambda listener: one_stage(listener, **metrics)) == []
    start, complete = read(tmp_path / "new" / "events.ndjson")
    assert states([start, complete]) == [("sft", "START"), ("sft", "COMPLETE")]
    assert start["run"]["runId"] == complete["run"]["runId"]
    assert {event["job"]["namespace"] for event in (start, complete)} == {"small"}
    assert [(used["namespace"], used["name"]) for used in start["inputs"]] == [("s3://bucket/store", str(ROWS))]
    assert start["outputs"] == []
    assert [(made["namespace"], made["name"]) for made in complete["outputs"]] == [("s3://bucket/store", str(MODEL))]
    facet = complete["run"]["facets"]["alignment_stage"]
    assert (facet["cached"], facet["metrics"], facet["stage"], facet["key"]) == (False, {"loss": 0.5}, "sft", "1" * 64)
    assert "record" not in facet
    assert complete["run"]["facets"]["parent"]["run"]["runId"] == RUN


def test_a_cached_stage_says_so_in_both_events_and_names_its_record(tmp_path: Path) -> None:
    def events(listener: Any) -> None:
        listener.requested(call(), "1" * 64)
        listener.produced(cached("sft"))

    send(tmp_path / "events", tmp_path, events)
    start, complete = read(tmp_path / "events")
    assert states([start, complete]) == [("sft", "START"), ("sft", "COMPLETE")]
    assert start["run"]["facets"]["alignment_stage"]["cached"] is True
    facet = complete["run"]["facets"]["alignment_stage"]
    assert (facet["cached"], facet["record"], facet["reason"]) == (True, "3" * 64, "same key")


def test_failed_stopped_and_abandoned_stages_end_once_also_without_a_start(tmp_path: Path) -> None:
    def events(listener: Any) -> None:
        for label in ("fails", "stops", "hangs", "unreadable"):
            listener.requested(call(label), "1" * 64)
        for label in ("fails", "stops", "hangs"):
            listener.started(label)
        listener.raised("fails", NumericError("the loss is not finite"))
        listener.raised("stops", Stopped("stopped after 3 steps"))
        listener.raised("unreadable", KeyError())
        listener.failed("fails", "failed; stages that do not need it continue")

    assert send(tmp_path / "events", tmp_path, events) == []
    written = read(tmp_path / "events")
    ends = {event["job"]["name"]: event for event in written if event["eventType"] != "START"}
    assert {name: event["eventType"] for name, event in ends.items()} == {
        "fails": "FAIL",
        "stops": "ABORT",
        "hangs": "ABORT",
        "unreadable": "FAIL",
    }
    assert len(written) == 8
    messages = {name: event["run"]["facets"]["errorMessage"]["message"] for name, event in ends.items()}
    assert (messages["fails"], messages["unreadable"]) == ("the loss is not finite", "KeyError")


def test_a_retried_stage_starts_once(tmp_path: Path) -> None:
    def events(listener: Any) -> None:
        listener.requested(call(), "1" * 64)
        listener.started("sft")
        listener.warned("sft", "retry 1 of 2")
        one_stage(listener)

    send(tmp_path / "events", tmp_path, events)
    assert states(read(tmp_path / "events")) == [("sft", "START"), ("sft", "COMPLETE")]


def test_two_branches_with_one_key_are_two_runs(tmp_path: Path) -> None:
    def events(listener: Any) -> None:
        one_stage(listener, "a/sft")
        listener.requested(call("b/sft"), "1" * 64)
        listener.produced(cached("b/sft"))

    send(tmp_path / "events", tmp_path, events)
    assert len({event["run"]["runId"] for event in read(tmp_path / "events")}) == 2


def test_a_resumed_run_sends_only_what_was_not_completed_as_another_attempt(tmp_path: Path) -> None:
    def before(listener: Any) -> None:
        one_stage(listener, "data")
        listener.requested(call("sft"), "4" * 64)
        listener.started("sft")
        listener.raised("sft", NumericError("no"))

    def after(listener: Any) -> None:
        listener.requested(call("data"), "1" * 64)
        listener.produced(cached("data"))
        listener.requested(call("sft"), "4" * 64)
        listener.started("sft")
        listener.produced(result("sft"))

    send(tmp_path / "events", tmp_path, before)
    send(tmp_path / "events", tmp_path, after, attempt=2)
    written = read(tmp_path / "events")
    assert states(written) == [
        ("data", "START"),
        ("data", "COMPLETE"),
        ("sft", "START"),
        ("sft", "FAIL"),
        ("sft", "START"),
        ("sft", "COMPLETE"),
    ]
    assert len({event["run"]["runId"] for event in written}) == 3, "a run that failed does not come back"


def test_the_record_of_a_stage_has_the_run_id_of_its_events(tmp_path: Path) -> None:
    from alignment_core.artifacts import Provenance
    from alignment_core.tracking.openlineage_events import of_record, to_json

    send(tmp_path / "events", tmp_path, one_stage, attempt=2)
    ids = {"prefect": RUN, "openlineage": openlineage.attempt_id(RUN, 2)}
    made = Provenance(key="1" * 64, stage="sft", label="sft", outputs={"model": MODEL}, run_ids=ids)
    exported = json.loads(to_json(of_record("s3://bucket/store", "small", made)))
    assert {event["run"]["runId"] for event in read(tmp_path / "events")} == {exported["run"]["runId"]}


def test_secrets_and_hostile_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_read", {"5ecret-value"})
    label = 'x"\n{"eventType": "COMPLETE"}\x00\ud800'

    def events(listener: Any) -> None:
        one_stage(listener, label)
        listener.requested(call("fails"), "1" * 64)
        listener.raised("fails", UserError("https://me:5ecret-value@host answers 401, hf_" + "a1" * 12))

    assert send(tmp_path / "events", tmp_path, events) == []
    written = read(tmp_path / "events")
    assert [event["job"]["name"] for event in written][:2] == [label, label]
    assert len(written) == 4
    text = (tmp_path / "events").read_text()
    assert "5ecret-value" not in text
    assert "a1a1" not in text


def test_a_file_that_a_killed_process_left_within_a_line_is_continued(tmp_path: Path) -> None:
    (tmp_path / "events").write_text('{"eventType": "STA')
    send(tmp_path / "events", tmp_path, one_stage)
    first, *lines = (tmp_path / "events").read_text().splitlines()
    assert first == '{"eventType": "STA'
    assert [json.loads(line)["eventType"] for line in lines] == ["START", "COMPLETE"]


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warning, lost = send(tmp_path / "file" / "events", tmp_path, one_stage)
    assert warning.startswith(f"OpenLineage: {tmp_path}/file/events cannot be written: ")
    assert lost == f"OpenLineage: 2 events were not sent to {tmp_path}/file/events"
    full, _ = send("/dev/full", tmp_path, one_stage)
    assert "/dev/full" in full


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_another_user_cannot_append_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    child = os.fork()
    if child == 0:  # another user: root may write everywhere
        code = 1
        try:
            os.setuid(4343)
            openlineage.append(folder / "events", "{}")
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Receiver(ThreadingHTTPServer):
    """A server of OpenLineage: it keeps events and headers, and answers after ``seconds`` with ``code``."""

    daemon_threads = True

    def __init__(self, port: int = 0, seconds: float = 0.0, code: int = 201) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.seconds, self.code = seconds, code
        self.events: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(server.seconds)
        if server.code < 300:
            server.events.append(json.loads(body))
        server.headers.append(dict(self.headers))
        server.paths.append(self.path)
        self.send_response(server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def receiver(**how: Any) -> Iterator[Receiver]:
    with Receiver(**how) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_a_server_gets_each_event_with_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "k3y-of-the-server")
    with receiver() as server:
        assert send(server.address, tmp_path, one_stage) == []
        assert send(f"{server.address}/below/", tmp_path / "other", one_stage) == []
        assert send(f"{server.address}/api/v1/lineage", tmp_path / "third", one_stage) == []
    for event in server.events:
        jsonschema.validate(event, EVENT)
    assert states(server.events) == [("sft", "START"), ("sft", "COMPLETE")] * 3
    assert server.paths == ["/api/v1/lineage"] * 2 + ["/below/api/v1/lineage"] * 2 + ["/api/v1/lineage"] * 2
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k3y-of-the-server"}
    assert "k3y-of-the-server" not in json.dumps(server.events)
    assert b"k3y-of-the-server" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_nothing_is_sent_if_openlineage_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    with receiver() as server:
        assert send(server.address, tmp_path, one_stage) == []
        assert send(tmp_path / "events", tmp_path, one_stage) == []
    assert (server.events, (tmp_path / "events").exists()) == ([], False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def many(listener: Any) -> None:
    for number in range(50):
        one_stage(listener, f"stage-{number}")


def test_a_server_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    assert send(address, tmp_path, many) == [
        f"OpenLineage: {address} cannot be reached; the run continues, and sends its events later if it can",
        f"OpenLineage: 100 events were not sent to {address}",
    ]


@pytest.mark.parametrize("code", [401, 503])
def test_a_server_that_answers_with_an_error_is_one_sentence(tmp_path: Path, code: int) -> None:
    with receiver(code=code) as server:
        warning, _ = send(server.address, tmp_path, many)
    assert f"answers {code} " in warning
    assert len(server.paths) == 2, "it is left alone for a while, and tried once more at the end"


def test_an_event_that_a_server_refuses_holds_up_no_other(tmp_path: Path) -> None:
    with receiver(code=400) as server:
        (warning,) = send(server.address, tmp_path, many)
    assert "answers 400 " in warning
    assert warning.endswith("for an event, which is left out")
    assert len(server.paths) == 100


def test_the_end_of_a_run_tries_a_server_again_that_is_back(tmp_path: Path) -> None:
    port = free_port()
    warnings: list[str] = []
    listener = OpenLineageEvents(f"http://127.0.0.1:{port}", run(), tmp_path, warnings.append)
    one_stage(listener, "a")
    with receiver(port=port) as server:
        listener.ended(True)
    assert states(server.events) == [("a", "START"), ("a", "COMPLETE")]
    assert len(warnings) == 1


def test_a_stage_that_runs_again_as_its_result_is_gone_has_events_again(tmp_path: Path) -> None:
    send(tmp_path / "events", tmp_path, one_stage)
    (tmp_path / openlineage.SENT).open("a").write("5\n[[1], 2]\n{\n")
    send(tmp_path / "events", tmp_path, one_stage, attempt=2)
    assert [state for _, state in states(read(tmp_path / "events"))] == ["START", "COMPLETE"] * 2


def test_a_silent_server_costs_one_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openlineage, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        warning, _ = send(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, many)
        assert time.monotonic() - began < 10, "fifty stages would be twenty seconds"
    assert "does not answer within 0.2 s" in warning


def test_a_slow_server_holds_up_no_stage_and_gets_everything(tmp_path: Path) -> None:
    with receiver(seconds=0.2) as server:
        warnings: list[str] = []
        opening = {"OpenLineage": lambda: OpenLineageEvents(server.address, run(), tmp_path, warnings.append)}
        with listening(opening, warnings.append) as (listener,):
            for number in range(5):
                one_stage(listener, f"stage-{number}")
            assert len(server.events) < 10, "the stages did not wait for ten answers"
    assert (len(server.events), warnings) == (10, [])


def test_a_server_that_dies_and_returns_gets_the_events_of_the_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openlineage, "RETRY_SECONDS", 0.0)
    warnings: list[str] = []
    port = free_port()
    listener = OpenLineageEvents(f"http://127.0.0.1:{port}", run(), tmp_path, warnings.append)
    with receiver(port=port) as first:
        one_stage(listener, "a")
    one_stage(listener, "b")
    with receiver(port=port) as second:
        one_stage(listener, "c")
        listener.ended(True)
    assert states(first.events) == [("a", "START"), ("a", "COMPLETE")]
    assert states(second.events) == [(label, state) for label in "bc" for state in ("START", "COMPLETE")]
    assert len(warnings) == 1


def test_a_proxy_that_is_gone_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    warning, _ = send("http://lineage.invalid:5000", tmp_path, one_stage)
    assert "http://lineage.invalid:5000 cannot be reached" in warning


def test_the_field_takes_a_path_or_an_address(tmp_path: Path) -> None:
    for target in ("http://127.0.0.1:5000", "https://lineage.example/marquez", "/var/events.ndjson"):
        assert recipe_with({"openlineage": target}).tracking.openlineage == target
    for target, problem in (
        ("kafka://host/topic", "kafka:// takes no events; use http://, https://, or the path of a file"),
        ("http://", "the address names no host"),
        ("https://me@host", "must not contain a user, a password or a query"),
        ("https://host/?a=b", "must not contain a user, a password or a query"),
        ("https://me:5w0rdfish@host", "holds a secret"),
        ("", "openlineage"),
    ):
        with pytest.raises(UserError, match=re.escape(problem)) as caught:
            recipe_with({"openlineage": target})
        assert "tracking.openlineage" in str(caught.value)
        assert "5w0rdfish" not in str(caught.value)
