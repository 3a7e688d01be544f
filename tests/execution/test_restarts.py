"""A failed stage restarts from its progress: how often, after which failures, and what its record contains."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import (
    AlignmentError,
    DataError,
    DeadlineExceeded,
    EnvironmentFault,
    GpuOccupied,
    InfrastructureError,
    MemoryPressure,
    NumericError,
    OutOfMemory,
    RestartsExhausted,
    Stopped,
)
from alignment_core.execution import restarts
from alignment_core.execution.base import Stage, StageCall, StageConfig, StageContext, StageResult
from alignment_core.machine_memory import Memory
from alignment_core.recipes import ResourcesConfig
from tests.stages.calls import offer, run_alone

CALL = StageCall(stage="patient", label="round-1/patient", config={}, inputs={})
Behaviour = Callable[[StageContext], None]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StageResult]:
    """Run a stage with one function per attempt, the last one for all further attempts."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.0)

    def run(*behaviours: Behaviour, **resources: Any) -> StageResult:
        attempts = iter(range(1000))

        def body(context: StageContext, _: StageConfig) -> dict[str, Any]:
            assert list(context.output.iterdir()) == [], "each attempt has its own output folder"
            number = next(attempts)
            (context.output / "result").write_text("the same")
            (context.output / f"attempt-{number}").touch()
            behaviours[min(number, len(behaviours) - 1)](context)
            (context.output / f"attempt-{number}").unlink()
            return {"attempts": number + 1}

        offer(monkeypatch, Stage("patient", 1, {"thing": "thing"}, StageConfig, body))
        return run_alone(store, CALL, **resources)

    return run


def fail(error: Exception) -> Behaviour:
    def behave(_: StageContext) -> None:
        raise error

    return behave


def succeed(_: StageContext) -> None:
    return None


def test_a_stage_restarts_from_its_progress_after_a_death_and_the_record_counts_restarts(
    run: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def leave_progress_and_die(context: StageContext) -> None:
        (context.progress / "checkpoint").write_text("half")
        raise InfrastructureError("trainers: an actor died during `train`")

    def go_on(context: StageContext) -> None:
        assert (context.progress / "checkpoint").read_text() == "half"

    result = run(leave_progress_and_die, leave_progress_and_die, go_on)
    assert result.metrics == {"attempts": 3}
    assert result.cost["restarts"] == 2
    assert "round-1/patient: trainers: an actor died during `train`; restart 2 of 3" in caplog.text
    assert store.records.find(result.key).cost["restarts"] == 2  # type: ignore[union-attr]
    assert [path.name for path in store.fetch(result.reference).iterdir()] == ["result"]


def test_seconds_of_a_stage_are_those_of_all_its_attempts_without_waits(run: Any, store: Store) -> None:
    def wait(context: StageContext) -> None:
        context.ticket.waits("the engines")
        time.sleep(0.3)
        context.ticket.waits(None)

    def wait_and_die(context: StageContext) -> None:
        wait(context)
        raise InfrastructureError("trainers: an actor died during `train`")

    began = time.monotonic()
    result = run(wait_and_die, wait)
    worked = time.monotonic() - began - result.cost["waited_seconds"]
    assert result.cost["waited_seconds"] >= 0.6
    assert max(result.seconds, store.records.find(result.key).seconds) <= worked + 0.01  # type: ignore[union-attr]


@pytest.mark.parametrize("allowed", [0, 2])
def test_restarts_are_bounded_and_tasks_do_not_retry_an_abandoned_stage(run: Any, allowed: int) -> None:
    attempts: list[int] = []

    def die(_: StageContext) -> None:
        attempts.append(1)
        raise InfrastructureError("engines: an actor died during `generate`")

    with pytest.raises(RestartsExhausted, match=r"actor died during `generate` .*resources\.actor_restarts") as caught:
        run(die, actor_restarts=allowed)
    assert len(attempts) == allowed + 1
    assert not caught.value.retryable


def test_out_of_memory_halves_the_micro_batch_until_the_stage_fits(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    budgets: list[int] = []

    def needs_little(context: StageContext) -> None:
        budgets.append(context.resources.token_budget)
        if budgets[-1] > 300:
            raise OutOfMemory(f"out of memory with micro-batches of {budgets[-1]} tokens")

    result = run(needs_little, max_tokens_per_microbatch=1024, actor_restarts=0)
    assert budgets == [1024, 512, 256]
    assert result.cost["tokens_per_microbatch"] == 256
    assert "retrying with resources.max_tokens_per_microbatch 256" in caplog.text


def test_out_of_memory_while_a_run_is_stopped_begins_no_other_attempt() -> None:
    stopping = threading.Event()

    def attempt(*_: Any) -> None:
        stopping.set()
        raise OutOfMemory("it does not fit")

    with pytest.raises(Stopped, match="sft: stopped, and it does not fit"):
        restarts.with_restarts("sft", ResourcesConfig(), stopping, attempt)


def test_no_smaller_micro_batch_is_tried_beside_processes_that_hold_most_of_the_memory(run: Any) -> None:
    says = (
        "it does not fit; lower resources.gpu_memory_utilization, set resources.placement: disaggregated, or end the "
    )
    with pytest.raises(GpuOccupied, match=f"round-1/patient: {says}other processes$") as caught:
        run(fail(GpuOccupied("it does not fit")), succeed)
    assert (caught.value.exit_code, caught.value.retryable) == (3, False)


@pytest.mark.parametrize(
    ("resources", "settings"),
    [
        (
            {},
            "set resources.gradient_checkpointing or resources.zero_stage: 3 or resources.sequence_parallel_size, ",
        ),
        ({"zero_stage": 3, "sequence_parallel_size": 2}, "set resources.gradient_checkpointing, "),
        ({"gradient_checkpointing": True, "sequence_parallel_size": 2}, "set resources.zero_stage: 3, "),
        ({"gradient_checkpointing": True, "zero_stage": 3}, "set resources.sequence_parallel_size, "),
        ({"zero_stage": 3, "gradient_checkpointing": True, "sequence_parallel_size": 2}, ""),
        (
            {"trainer_tensor_parallel_size": 2},
            "set resources.gradient_checkpointing or a larger resources.trainer_tensor_parallel_size, ",
        ),
    ],
)
def test_running_out_of_memory_at_the_smallest_micro_batch_names_fields_that_may_help(
    run: Any, resources: dict[str, Any], settings: str
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        run(fail(OutOfMemory("it does not fit")), max_tokens_per_microbatch=100, **resources)
    assert str(caught.value) == (
        "round-1/patient: it does not fit, and no smaller size is left to try; lower the data's max_length, "
        f"{settings}or use devices with more memory"
    )
    assert (caught.value.exit_code, caught.value.retryable) == (3, False)


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("1 of 2 trainers did not answer `train`"),
        NumericError("the loss is nan"),
        DataError("no rows"),
        EnvironmentFault("no GPU"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_a_restart_cannot_fix_are_raised_at_once(run: Any, error: AlignmentError) -> None:
    with pytest.raises(type(error), match=str(error)):
        run(fail(error), succeed)


def test_a_disk_that_fills_up_in_a_stage_is_a_sentence_and_leaves_no_artifact(run: Any, store: Store) -> None:
    with pytest.raises(EnvironmentFault, match="the disk is full; free space"):
        run(fail(OSError(errno.ENOSPC, "No space left on device", "shard-00000.partial")))
    assert list(store.artifacts()) == []
    assert list(store.workspace.temporary.iterdir()) == []
    assert run(succeed).state == "run"


def test_after_a_kill_for_memory_of_other_processes_the_stage_waits_and_no_restart_is_used(
    run: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3 GiB needed, 256 MiB of margin and 1 GiB in use by the run, 2.25 GiB must be free: 1 GiB is not, 4 GiB are."""
    free = iter([1 << 30, 4 << 30] * 5)
    monkeypatch.setattr(restarts, "machine_memory", lambda: Memory(100 << 30, (95 << 30) - next(free)))
    monkeypatch.setattr(restarts, "used_by", lambda _: 1 << 30)
    monkeypatch.setattr(restarts, "MEMORY_CHECK_SECONDS", 0.0)
    pressure = fail(MemoryPressure("trainers: an actor died during `train`: other processes 19.5 GiB", 3 << 30))
    result = run(*[pressure] * 5, succeed, actor_restarts=0)
    assert result.cost["memory_kills"] == 5
    assert "restarts" not in result.cost


def test_memory_that_does_not_become_free_ends_the_stage_with_a_sentence(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "machine_memory", lambda: Memory(100 << 30, 95 << 30))
    monkeypatch.setattr(restarts, "used_by", lambda _: 0)
    monkeypatch.setattr(restarts, "MEMORY_CHECK_SECONDS", 0.0)
    with pytest.raises(EnvironmentFault, match=r"3\.2 GiB of the 3\.0 GiB .* not free after 0\.1 seconds"):
        run(fail(MemoryPressure("killed", 3 << 30)), wait_timeout_seconds=0.1)


def test_kills_for_the_memory_of_others_are_bounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "machine_memory", lambda: Memory(100 << 30, 0))
    monkeypatch.setattr(restarts, "MOST_MEMORY_KILLS", 2)
    attempts: list[int] = []

    def die(_: StageContext) -> None:
        attempts.append(1)
        raise MemoryPressure("killed", 1 << 30)

    with pytest.raises(RestartsExhausted):
        run(die, actor_restarts=1)
    assert len(attempts) == 2 + 1 + 1


def test_each_restart_is_reported_with_reason_and_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_SECONDS", 0.0)
    sentences: list[str] = []
    failures = iter([InfrastructureError("trainers[1] died"), OutOfMemory("512 tokens do not fit")])

    def attempt(*_: Any) -> str:
        for error in failures:
            raise error
        return "done"

    resources = ResourcesConfig(max_tokens_per_microbatch=512)
    assert restarts.with_restarts("sft", resources, threading.Event(), attempt, sentences.append) == "done"
    assert sentences == [
        "trainers[1] died; restart 1 of 3",
        "512 tokens do not fit; retrying with resources.max_tokens_per_microbatch 256",
    ]
