"""The reconciler with clock changes and runs that die at once: which runs count as dead, and how often they resume."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled

from alignment.flows.preflight import CommandLine
from alignment.flows.runs import _running
from alignment.flows.service.reconcile import EVERY_SECONDS, MOST_RESUMPTIONS, SILENCE_SECONDS, Reconciler
from alignment.flows.stale_runs import close_not_begun
from alignment_core.errors import UserError
from alignment_core.journal import Journal, new_record
from tests.tracking.watched import recipe_with

STEP = timedelta(seconds=SILENCE_SECONDS)


class Server:
    """Stands for Prefect's server, because no real one gives a run states and heartbeats of clocks that are set."""

    def __init__(self, *states: State, deployed: bool = True) -> None:
        self.clock = 0.0
        self.states: list[State] = []
        self.heartbeats = 0
        self.run = FlowRun(id=uuid4(), name="small", flow_id=uuid4(), deployment_id=uuid4() if deployed else None)
        for state in states:
            self.becomes(state)
        self._client = SimpleNamespace(post=lambda *_, **__: SimpleNamespace(json=lambda: {"total": self.heartbeats}))

    def becomes(self, state: State) -> None:
        self.states.append(state)
        more = self.run.run_count + (1 if state.is_running() else 0)
        self.run = self.run.model_copy(update={"state": state, "run_count": more})

    def read_flow_runs(self, flow_run_filter: Any, **_: Any) -> list[FlowRun]:
        return [self.run] if self.run.state and self.run.state.type in flow_run_filter.state.type.any_ else []

    def read_flow_run_states(self, _: UUID) -> list[State]:
        return self.states

    def set_flow_run_state(self, _: UUID, state: State, force: bool) -> None:
        self.becomes(state)

    def read_task_runs(self, **_: Any) -> list[Any]:
        return []

    def read_artifacts(self, **_: Any) -> list[Any]:
        return []

    def looked_at(self, reconciler: Reconciler, seconds: float) -> list[str]:
        """The reconciler's actions within this many seconds."""
        did = []
        for _ in range(round(seconds / EVERY_SECONDS)):
            self.clock += EVERY_SECONDS
            did += [action.did for action in reconciler.look(self)]  # type: ignore[arg-type]
        return did


pytestmark = pytest.mark.usefixtures("home")


def at(state: State, moment: timedelta) -> State:
    return state.model_copy(update={"timestamp": datetime.now(UTC) + moment})


@pytest.mark.parametrize("step", [-2 * STEP, 2 * STEP, timedelta(days=7)], ids=["back", "ahead", "a week ahead"])
def test_clocks_that_differ_mark_no_run_of_another_machine(step: timedelta) -> None:
    server = Server(at(Running(), step), deployed=False)
    reconciler = Reconciler(lambda: server.clock)
    for _ in range(10):
        server.heartbeats += 1
        assert server.looked_at(reconciler, 30) == []
    assert server.looked_at(reconciler, SILENCE_SECONDS - 30) == []
    assert server.looked_at(reconciler, 30) == ["crashed"], "no heartbeat for two minutes"


def attempt(server: Server, status: str = "completed") -> None:
    """The journal of a process that ran the run, and is dead."""
    record = new_record(str(server.run.id), "small", {}, "store", run_count=server.run.run_count)
    with Journal(record).open() as journal:
        journal.end(status)


def test_a_dead_process_of_this_machine_is_detected_despite_clock_changes() -> None:
    server = Server(at(Running(), timedelta(days=1)))  # the clock went back since
    attempt(server)
    assert server.looked_at(Reconciler(lambda: server.clock), 2 * EVERY_SECONDS) == ["crashed"]
    server = Server(Running(), Cancelling())
    attempt(server)
    assert server.looked_at(Reconciler(lambda: server.clock), 2 * EVERY_SECONDS) == ["cancelled"]


def test_a_lock_that_is_not_seen_here_marks_no_run_of_another_machine() -> None:
    server = Server(Running())
    record = new_record(str(server.run.id), "small", {}, "store", run_count=server.run.run_count)
    with Journal(record.model_copy(update={"boot": "another boot"})).open():
        pass
    reconciler = Reconciler(lambda: server.clock)
    for _ in range(10):
        server.heartbeats += 1
        assert server.looked_at(reconciler, 30) == []
    assert server.looked_at(reconciler, SILENCE_SECONDS + 30)[:1] == ["crashed"]


def test_a_starting_attempt_is_not_mistaken_for_the_crashed_one() -> None:
    server = Server(Running())
    attempt(server)
    for state in (Crashed(), Scheduled(), Pending()):
        server.becomes(state)
    reconciler = Reconciler(lambda: server.clock)
    assert server.looked_at(reconciler, 60) == []
    server.becomes(Running())
    assert server.looked_at(reconciler, 60) == []


def test_a_repeatedly_stopped_run_resumes_each_time() -> None:
    server = Server(Scheduled(), Pending())
    reconciler = Reconciler(lambda: server.clock)
    for _ in range(2 * MOST_RESUMPTIONS):  # `align down`, and up
        server.becomes(Running())
        attempt(server, "stopped")
        server.becomes(Crashed())
        assert server.looked_at(reconciler, 10) == ["resumed"]
    for number in range(2, MOST_RESUMPTIONS + 2):
        server.becomes(Pending())
        server.becomes(Crashed())  # before it is Running: this attempt was not told to stop
        assert server.looked_at(reconciler, 400) == ["resumed"]
        assert server.run.state is not None
        assert server.run.state.message == f"Goes on: attempt {number} of at most {MOST_RESUMPTIONS + 1}"
    server.becomes(Crashed())
    assert server.looked_at(reconciler, 400) == ["given up"]


def test_a_run_that_dies_while_pending_resumes_a_few_times_with_growing_pauses() -> None:
    server = Server(Scheduled(), Pending(), Crashed())
    reconciler, at_seconds = Reconciler(lambda: server.clock), []
    while server.clock < 3600:
        if "resumed" in server.looked_at(reconciler, EVERY_SECONDS):
            at_seconds.append(server.clock)
            for state in (Pending(), Crashed()):
                server.becomes(state)
    assert len(at_seconds) == MOST_RESUMPTIONS
    pauses = [later - earlier for earlier, later in zip([0.0, *at_seconds], at_seconds, strict=False)]
    assert pauses == [10.0, 20.0, 55.0, 200.0]
    assert server.looked_at(Reconciler(lambda: server.clock), 600) == ["given up"], (
        "a new reconciler starts counting from zero"
    )
    server.becomes(Scheduled(name="ResumingByHand"))
    server.becomes(Crashed())
    assert server.looked_at(reconciler, 60) == ["resumed"], "a user has inspected it"


def test_old_crashes_are_not_resumed_and_recent_crashes_are_despite_clock_jumps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(Running(), at(Crashed(), -timedelta(days=2)))
    assert server.looked_at(Reconciler(lambda: server.clock), 600) == []
    server = Server(Running(), Crashed())
    reconciler = Reconciler(lambda: server.clock)
    assert server.looked_at(reconciler, EVERY_SECONDS) == []
    server.run.state.timestamp -= timedelta(days=7)  # type: ignore[union-attr]
    assert server.looked_at(reconciler, EVERY_SECONDS) == ["resumed"]


def test_a_run_without_a_deployment_is_not_resumed() -> None:
    server = Server(Running(), Crashed(), deployed=False)
    assert server.looked_at(Reconciler(lambda: server.clock), 600) == []


def test_task_runs_of_an_attempt_are_closed_by_the_next_once_its_process_has_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FlowRun(id=uuid4(), name="small", flow_id=uuid4(), run_count=2)
    closed: list[Any] = []
    monkeypatch.setattr("alignment_core.journal.STOPPING_SECONDS", 0)
    monkeypatch.setattr("alignment.flows.runs.flow_run", lambda: run)
    monkeypatch.setattr("alignment.flows.runs.get_client", lambda **_: nullcontext())
    monkeypatch.setattr("alignment.flows.runs.clear_page", lambda *args: closed.append(args))
    monkeypatch.setattr("alignment.flows.runs._listeners", lambda *_: _fails())  # far enough
    recipe, caller = recipe_with({}), CommandLine(None, None)
    with Journal(new_record(str(run.id), "small", {}, "store")).open():
        with (
            pytest.raises(UserError, match="is running in another process already"),
            _running(recipe, None, {}, caller),
        ):
            pass
        assert closed == []
    with pytest.raises(RuntimeError, match="far enough"), _running(recipe, None, {}, caller):
        pass
    assert len(closed) == 1


def _fails() -> Any:
    raise RuntimeError("far enough")


def test_tasks_not_begun_are_closed_as_skipped_with_the_reason() -> None:
    """The message names the stage it waited for, of which Prefect's state has only the id."""
    closed: dict[UUID, State] = {}
    named: dict[UUID, str] = {}
    failed = uuid4()
    waits = Pending(name="NotReady", message=f"Upstream task run '{failed}' did not reach a 'COMPLETED' state.")
    tasks = {
        "sft/data": (failed, Failed()),
        "sft": (uuid4(), waits),
        "model": (uuid4(), Completed()),
        "dpo": (uuid4(), Pending()),
    }
    steps: Any = [
        SimpleNamespace(label=label, future=SimpleNamespace(task_run_id=task, state=state))
        for label, (task, state) in tasks.items()
    ]
    client: Any = SimpleNamespace(
        set_task_run_state=lambda task_run, state, force: closed.update({task_run: state}),
        set_task_run_name=lambda task_run, name: named.update({task_run: name}),
    )
    assert close_not_begun(client, steps) == ["sft", "dpo"]
    assert {task_run: (state.type.value, state.name, state.message) for task_run, state in closed.items()} == {
        tasks["sft"][0]: ("CANCELLED", "Skipped", "sft/data did not complete"),
        tasks["dpo"][0]: ("CANCELLED", "Skipped", "the run ended before it began"),
    }
    assert named == {tasks["sft"][0]: "sft", tasks["dpo"][0]: "dpo"}
