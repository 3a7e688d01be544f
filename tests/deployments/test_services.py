"""`align up` for real: a server, a worker and the reconciler; and the recovery of runs whose processes die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Running

from alignment.flows.recipe_flow import alignment
from alignment.flows.service.prefect_worker import TEMPORARY
from alignment.flows.service.reconcile import SILENCE_SECONDS, Reconciler
from alignment.flows.service.services import State
from alignment.flows.service.supervisor import trim
from alignment.flows.shipped_recipes import shipped
from alignment_core import journal
from tests.deployments.endings import OVERRIDES, check_that_it_goes_on, steps, times_started, training
from tests.deployments.up import ALIGN, PASSWORD, Services
from tests.matrix import matrix
from tests.processes import processes_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_status_lists_the_running_services(services: Services) -> None:
    status = services.align("status")["services"]
    assert status["phase"] == "ready"
    assert [service["name"] for service in status["services"]] == ["server", "worker", "reconciler", "pages"]


def test_the_pages_of_artifacts_answer_and_come_back_at_the_same_address(services: Services) -> None:
    address = services.align("status")["services"]["pages"]
    assert "Artifacts" in httpx.get(f"{address}artifacts").text
    assert httpx.post(f"{address}labels/x/begin").status_code == 403
    os.kill(services.pid("pages"), signal.SIGKILL)

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{address}runs").is_success
        return False

    assert wait_until(lambda: services.align("status")["services"]["services"][3]["restarts"] >= 1, 60)
    assert wait_until(answers, 60)


def test_the_worker_keeps_temporary_files_in_its_own_folder(services: Services) -> None:
    variables = psutil.Process(services.pid("worker")).environ()
    assert wait_until((Path(variables[TEMPORARY]) / "runner_storage").is_dir, 60)
    assert variables.get("TMPDIR") == os.environ.get("TMPDIR"), "runs start Ray below it: its sockets need short paths"


def test_a_second_up_changes_nothing_and_a_taken_port_is_refused(services: Services, tmp_path: Path) -> None:
    before = services.align("status")["services"]["pid"]
    assert services.align("up", "--port", str(services.port))["pid"] == before
    other = Services(tmp_path / "other")
    refused = other.align("up", "--port", str(services.port), expect=3)
    assert f"port {services.port} is not free" in refused["error"]


def test_a_killed_service_is_restarted(services: Services) -> None:
    killed = services.pid("reconciler")
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: services.align("status")["services"]["services"][2]["restarts"] >= 1, 60)


def test_a_killed_run_resumes_by_itself_and_loses_no_step(services: Services, measured: Any) -> None:
    """`make test-long` ends it in all other ways."""
    marked, again = check_that_it_goes_on(services, "SIGKILL of worker and flow")
    measured(f"marked after {marked:.1f} s, training again {again:.1f} s later")


def test_a_run_on_a_silent_machine_is_marked_as_crashed(services: Services) -> None:
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


@pytest.mark.exhaustive
def test_the_default_database_is_sqlite_below_the_home(tmp_path: Path, migrated: Path) -> None:
    (tmp_path / "prefect").mkdir()
    shutil.copyfile(migrated, tmp_path / "prefect" / "prefect.db")
    services = Services(tmp_path)
    try:
        state = services.align("up", "--port", str(services.port))
        assert state["database"] == f"sqlite, {tmp_path}/prefect/prefect.db"
        assert len(services.get("/deployments/filter", {})) == len(shipped())
    finally:
        services.align("down")
    assert wait_until(lambda: not processes_of(tmp_path), 30), processes_of(tmp_path)


@pytest.mark.parametrize(
    "stop",
    matrix(["SIGINT", "SIGTERM", "SIGTERM of the foreground", "down"], usual=["SIGTERM of the foreground", "down"]),
)
def test_services_that_register_deployments_stop_promptly(tmp_path: Path, migrated: Path, stop: str) -> None:
    (tmp_path / "prefect").mkdir()
    shutil.copyfile(migrated, tmp_path / "prefect" / "prefect.db")
    services = Services(tmp_path)
    foreground = ["--foreground"] if "foreground" in stop else []
    command = [*ALIGN, "up", "--port", str(services.port), *foreground]
    up = subprocess.Popen(command, cwd="/", env=services.settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    registrations: list[int] = []

    def registers() -> bool:
        lines = processes_of(tmp_path)
        registrations.extend(
            pid for pid, line in lines.items() if "-m alignment.flows.deployments" in line and "supervisor" not in line
        )
        return bool(registrations)

    assert wait_until(registers, 60)
    os.kill(registrations[0], signal.SIGSTOP)  # it would register for ever
    if stop == "down":
        assert services.align("down") == {"stopped": True}
    else:
        up.send_signal(getattr(signal, stop.split()[0]))
    up.wait(30)
    assert wait_until(lambda: not processes_of(tmp_path), 5), processes_of(tmp_path)
    state = State.model_validate_json((tmp_path / "services" / "state.json").read_text())
    assert (state.phase, state.error) == ("stopped", None)
    assert services.align("status", expect=3)["services"] is None
    assert not (tmp_path / "services" / "token").exists()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_long_log_is_truncated_under_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.flows.service.supervisor.LONGEST_LOG_BYTES", 10)
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"what was said before")
        trim(log)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "server.old.log").read_bytes() == b"what was said before"


@pytest.fixture(scope="module")
def resumed(services: Services) -> str:
    """The id of a run that trains, for the third time: it was cancelled, then retried, and resumed while it ran."""
    endless = ["sft.training.num_train_epochs=100000", "sft.training.max_steps=200000"]
    run_id = services.start_run([*OVERRIDES, *endless, "seed=9"])
    assert wait_until(lambda: training(run_id), 120), services.states(run_id)
    services.prefect("flow-run", "cancel", run_id)
    assert wait_until(lambda: services.state(run_id) == "Cancelled", 120), services.states(run_id)
    assert wait_until(lambda: not any("host.server" in line for line in processes_of(services.home).values()), 60)

    services.prefect("flow-run", "retry", run_id)
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 2, 120)
    answer = services.align("resume", run_id)  # ends the process that still runs, and marks the run
    assert answer == {"run_id": run_id, "scheduled": True}
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 3, 120), services.states(run_id)
    return run_id


def test_a_cancelled_run_leaves_no_process_and_can_be_retried_and_resumed(services: Services, resumed: str) -> None:
    assert journal.read(resumed).attempt == 3
    explained = {stage["label"]: stage for stage in services.align("explain", resumed)["stages"]}
    assert explained["sft/data"]["state"] == "cached"
    assert "same key as sft/data of" in explained["sft/data"]["why"]
    assert explained["sft"]["state"] == "running"


def test_down_ends_everything_in_order(services: Services, resumed: str) -> None:
    assert wait_until(lambda: steps(resumed) > 0, 120), services.states(resumed)
    assert services.align("down") == {"stopped": True}
    assert journal.read(resumed).status == "stopped"
    assert (journal.folder_of(resumed) / "report.md").is_file()
    assert wait_until(lambda: not processes_of(services.home), 30), processes_of(services.home)
    assert services.align("status", expect=3)["services"] is None
    assert not list((services.home / "tmp").iterdir())
