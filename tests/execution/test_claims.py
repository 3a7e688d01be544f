"""Stages and nights that two machines want at once: nothing is shared but the store, and one of them does the work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store, open_store
from alignment_core.artifacts.leases import Lease
from alignment_core.artifacts.paths import running_path
from alignment_core.execution.base import Stage, StageCall, StageConfig, StageContext
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.execution.scheduling import RunName, Ticket
from alignment_core.recipes import ResourcesConfig
from tests.processes import ended, in_child, wait_until
from tests.stages.calls import HostAlone, offer


@pytest.fixture(params=["folder", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}"


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> Callable[[str], Store]:
    """The store as a machine of this name sees it, with a separate ALIGN_HOME."""

    def open_at(machine: str) -> Store:
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / machine))
        return open_store(uri)

    return open_at


def offer_stage(monkeypatch: pytest.MonkeyPatch, ran: Path, until: Callable[[], Any] = lambda: None) -> StageCall:
    """A stage that leaves a line in a file each time it runs, and ends once ``until`` has returned."""

    def work(context: StageContext, config: StageConfig) -> dict[str, Any]:
        with ran.open("a") as file:
            file.write(f"{os.environ['ALIGN_HOME']}\n")
        until()
        (context.output / "file").write_text("made")
        return {}

    offer(monkeypatch, Stage("work", 1, {"policy": "model"}, StageConfig, work))
    return StageCall(stage="work", label="sft", config={}, inputs={})


def run(store: Store, call: StageCall, waits: list[str | None], name: str) -> str:
    ticket = Ticket(waits=waits.append, run=RunName(name, "quickstart"))
    return run_stage(StageRequest(store, call, HostAlone(), ResourcesConfig(), lambda *_: None, ticket=ticket)).state


def test_a_stage_that_another_machine_runs_is_waited_for_and_its_result_taken(
    at: Callable[[str], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, go = tmp_path / "ran", tmp_path / "go"
    call = offer_stage(monkeypatch, ran, lambda: wait_until(go.exists, 60))
    lease = running_path(key_of(call).value)
    store = at("one")
    first = in_child(lambda: run(store, call, [], "11111111"))
    assert wait_until(lambda: store.leases.holder(lease) is not None, 30)

    class Waits(list[Any]):
        def append(self, reason: str | None) -> None:
            super().append(reason)
            go.touch()  # the other machine ends once this one reports that it waits

    waits = Waits()
    assert run(at("two"), call, waits, "22222222") == "cached"
    assert ended(first) == 0
    assert waits[0].startswith("the same stage in run 11111111 (quickstart)")
    assert waits[-1] is None
    assert ran.read_text().splitlines() == [str(tmp_path / "one")]
    assert store.leases.holder(lease) is None


def test_a_stage_whose_machine_is_gone_is_taken_over(
    at: Callable[[str], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    call = offer_stage(monkeypatch, ran)
    store = at("one")
    key = key_of(call).value
    lease = Lease.model_validate(
        {"owner": "gone", "process": {"pid": 1, "started": 1, "boot": "another"}, "seconds": 1e-3}
    )
    assert store.backend.put(running_path(key), lease.model_dump_json().encode())
    assert run(store, call, [], "11111111") == "run"
    assert not list(store.backend.list("leases/stages/"))


def test_a_machine_that_lost_its_home_in_the_middle_takes_its_own_stage_over_at_once(
    at: Callable[[str], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, dies = tmp_path / "ran", [True]
    call = offer_stage(monkeypatch, ran, lambda: os.kill(os.getpid(), signal.SIGKILL) if dies else None)
    store = at("one")
    assert ended(in_child(lambda: run(store, call, [], "11111111"))) == -signal.SIGKILL
    dies.clear()
    waits: list[str | None] = []
    assert run(at("another"), call, waits, "22222222") == "run"
    assert waits == [], "the kernel shows that the process is gone, so there is no wait for the lease to expire"
