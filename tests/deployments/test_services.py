"""`align up` for real: a server, a worker and the reconciler; and what becomes of a run whose processes end badly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Running

from alignment_core import journal
from flows.any_recipe import alignment
from flows.service.prefect_worker import TEMPORARY
from flows.service.reconcile import SILENCE_SECONDS, Reconciler
from flows.service.services_process import trim
from tests.deployments.up import PASSWORD, Services
from tests.processes import processes_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 250
OVERRIDES = [
    "model={scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}",
    "sft={data: {task: reverse, rows: 64}, training: {batch_size: 32, num_train_epochs: 500}}",
    f"sft.training.max_steps={STEPS}",
    "evaluation=null",
    "promotion=null",
    "resources={trainers: 1, engines: 1, progress_seconds: 3}",
]
ON_AGAIN_SECONDS = 60.0


def training(run_id: str) -> bool:
    """Whether the run has trained for long enough to have a checkpoint."""
    line = journal.stages(run_id).get("sft") if journal.folder_of(run_id).exists() else None
    progress = Path(os.environ["ALIGN_HOME"]) / "store" / "progress"
    return line is not None and line.state == "running" and any((progress / line.key).glob("step-*/complete.json"))


def steps(run_id: str) -> float:
    """How many steps the run has trained, as its newest attempt knows; 0 before that trains."""
    seen = journal.progress(run_id).get("sft")
    return seen.done if seen else 0.0


def times_started(run_id: str, label: str) -> list[datetime]:
    lines = journal.news(journal.folder_of(run_id))
    return [
        datetime.fromisoformat(line["at"]) for line in lines if (line["label"], line["state"]) == (label, "running")
    ]


def test_status_says_what_runs(services: Services) -> None:
    status = services.align("status")["services"]
    assert status["phase"] == "ready"
    assert [one["name"] for one in status["services"]] == ["server", "worker", "reconciler"]


def test_the_worker_leaves_nothing_where_another_users_worker_would(services: Services) -> None:
    variables = psutil.Process(services.pid("worker")).environ()
    assert wait_until((Path(variables[TEMPORARY]) / "runner_storage").is_dir, 60)
    assert variables.get("TMPDIR") == os.environ.get("TMPDIR"), "runs start Ray below it: its sockets need short paths"


def test_up_again_changes_nothing_and_a_taken_port_is_said(services: Services, tmp_path: Path) -> None:
    before = services.align("status")["services"]["pid"]
    assert services.align("up", "--port", str(services.port))["pid"] == before
    other = Services(tmp_path / "other")
    refused = other.align("up", "--port", str(services.port), expect=3)
    assert f"port {services.port} is not free" in refused["error"]


def test_a_service_that_is_killed_is_started_again(services: Services) -> None:
    killed = services.pid("reconciler")
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: services.align("status")["services"]["services"][2]["restarts"] >= 1, 60)


ENDS: dict[str, Callable[[Services, journal.RunRecord], None]] = {
    "SIGKILL of the flow": lambda _, record: os.kill(record.pid, signal.SIGKILL),
    "SIGTERM of the flow": lambda _, record: os.kill(record.pid, signal.SIGTERM),
    "SIGTERM of the worker": lambda services, _: os.kill(services.pid("worker"), signal.SIGTERM),
    "SIGKILL of worker and flow": lambda services, record: [
        os.kill(pid, signal.SIGKILL) for pid in (services.pid("worker"), record.pid)
    ],
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_badly_goes_on_by_itself_and_loses_no_step(services: Services, end: str, measured: Any) -> None:
    run_id = services.start_run([*OVERRIDES, f"seed={1 + list(ENDS).index(end)}"])
    watcher = services.watch("last")  # nothing has begun it yet
    assert wait_until(lambda: training(run_id), 120), services.states(run_id)
    ended, trained = time.time(), steps(run_id)
    ENDS[end](services, journal.read(run_id))
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 2 and steps(run_id) > 0, 240), services.states(
        run_id
    )
    assert steps(run_id) >= trained  # the first that an attempt says is the step of the checkpoint that it goes on from
    assert wait_until(lambda: services.state(run_id) in ("Completed", "Failed"), 240), services.states(run_id)

    states = services.states(run_id)
    names = [name for name, _ in states]
    assert names[-1] == "Completed"
    assert "Crashed" in names
    assert "Resuming" in names
    assert len(times_started(run_id, "sft")) == 2
    done = [one for one in journal.news(journal.folder_of(run_id)) if one["state"] == "run"]
    assert sorted(line["label"] for line in done) == ["model", "sft", "sft/data"], "no finished stage ran twice"

    watched, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert json.loads(watched) == {"run_id": run_id, "status": "completed", "attempt": 2, "message": None}

    crashed = next(at for name, at in states if name == "Crashed").timestamp()
    again = times_started(run_id, "sft")[1].timestamp()
    measured(f"marked after {crashed - ended:.1f} s, training again {again - crashed:.1f} s later")
    assert again - crashed < ON_AGAIN_SECONDS


def test_a_cancelled_run_leaves_no_process_and_can_be_retried_and_resumed(services: Services) -> None:
    endless = ["sft.training.num_train_epochs=100000", "sft.training.max_steps=200000"]
    run_id = services.start_run([*OVERRIDES, *endless, "seed=9"])
    assert wait_until(lambda: training(run_id), 120), services.states(run_id)
    cancel_and_wait(services, run_id)

    services.prefect("flow-run", "retry", run_id)
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 2, 120)
    resumed = services.align("resume", run_id)  # ends the process that still runs, and marks the run
    assert resumed == {"run_id": run_id, "scheduled": True}
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 3, 120), services.states(run_id)
    assert journal.read(run_id).attempt == 3
    explained = {stage["label"]: stage for stage in services.align("explain", run_id)["stages"]}
    assert explained["sft/data"]["state"] == "cached"
    assert "same key as sft/data of" in explained["sft/data"]["why"]
    assert explained["sft"]["state"] == "running"
    cancel_and_wait(services, run_id)


def cancel_and_wait(services: Services, run_id: str) -> None:
    services.prefect("flow-run", "cancel", run_id)
    assert wait_until(lambda: services.state(run_id) == "Cancelled", 120), services.states(run_id)
    assert wait_until(lambda: not any("host.server" in line for line in processes_of(services.home).values()), 60)


def test_a_run_of_a_machine_that_went_silent_is_marked(services: Services) -> None:
    with SyncPrefectClient(api=services.url, auth_string=services.token) as client:
        run = client.create_flow_run(alignment, name="elsewhere", state=Running())
        moment = 0.0
        reconciler = Reconciler(lambda: moment)
        assert reconciler.look(client) == []
        moment = SILENCE_SECONDS - 5
        assert reconciler.look(client) == []
        moment = SILENCE_SECONDS + 5
        assert reconciler.look(client) == [], "seen dead once"
        (action,) = reconciler.look(client)
        assert (action.run_id, action.did) == (str(run.id), "crashed")
        assert "no sign of life for 12" in action.why
    assert services.state(str(run.id)) == "Crashed"


def test_the_password_of_the_database_is_written_nowhere(services: Services) -> None:
    assert services.align("status")["services"]["database"].startswith("postgresql+asyncpg://127.0.0.1:")
    assert not (services.home / "prefect" / "prefect.db").exists()
    files = [path for path in services.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []


def test_without_a_database_it_is_sqlite_below_the_home(tmp_path: Path, migrated: Path) -> None:
    (tmp_path / "prefect").mkdir()
    shutil.copyfile(migrated, tmp_path / "prefect" / "prefect.db")
    services = Services(tmp_path)
    try:
        state = services.align("up", "--port", str(services.port))
        assert state["database"] == f"sqlite, {tmp_path}/prefect/prefect.db"
        assert len(services.get("/deployments/filter", {})) == 11
    finally:
        services.align("down")
    assert wait_until(lambda: not processes_of(tmp_path), 30), processes_of(tmp_path)


def test_a_long_log_begins_anew_under_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.service.services_process.LONGEST_LOG_BYTES", 10)
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"what was said before")
        trim(log)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "server.old.log").read_bytes() == b"what was said before"


def test_down_ends_everything_in_order(services: Services) -> None:
    run_id = services.start_run([*OVERRIDES, "seed=9"])
    assert wait_until(lambda: training(run_id), 120), services.states(run_id)
    assert services.align("down") == {"stopped": True}
    assert journal.read(run_id).status == "stopped"
    assert (journal.folder_of(run_id) / "report.md").is_file()
    assert wait_until(lambda: not processes_of(services.home), 30), processes_of(services.home)
    assert services.align("status", expect=3)["services"] is None
    assert not list((services.home / "tmp").iterdir())
