"""The Prefect task behind every stage: it looks for the result in the store, and then calls the run host."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Completed

from alignment.tasks.calling import result_of
from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.composition.graph import BranchFailed, StageSpec, Step, current, is_part
from alignment_core.credentials import refuse_literals
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.key import key_of
from alignment_core.host.client import Host
from alignment_core.journal import Journal
from alignment_core.printable import printable
from alignment_core.recipes import ResourcesConfig
from alignment_core.tracking import Listener

FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 120.0


@dataclass
class Run:
    """The :class:`~alignment_core.composition.graph.Composition` of a flow run, whose stages are Prefect tasks."""

    store: Store
    host: Host
    resources: ResourcesConfig
    seed: int
    journal: Journal
    accept: tuple[str, ...] = ()
    """Packages of other versions whose results are reused."""
    trust_remote_code: bool = False
    """Whether code that models bring may run, in all stages: the recipe's ``model.trust_remote_code``."""
    listeners: tuple[Listener, ...] = ()
    steps: list[SubmittedStage] = field(default_factory=list)
    training_data: dict[str, Step] = field(default_factory=dict)
    """Data sets that a stage trains on, by label."""
    announced: set[str] = field(default_factory=set)
    """Labels of the stages whose end was reported."""

    def __post_init__(self) -> None:
        self.snapshot = StoreSnapshot(self.store, uses=True)

    def submit(self, spec: StageSpec) -> SubmittedStage:
        """Submit a stage as a task. A stage may fail, too, if it needs one that may fail."""
        config = spec.config.model_dump(mode="json")
        refuse_literals(config, spec.label)
        spec.config.check()  # a mistake is reported now, not when the stage's turn comes
        inputs = {
            role: [value.future, value.name] if isinstance(value, SubmittedStage) else str(value)
            for role, value in spec.inputs.items()
        }
        after = spec.after if isinstance(spec.after, SubmittedStage) else None
        needed = tuple(value for value in (*spec.inputs.values(), after) if isinstance(value, SubmittedStage))
        again = self.runs_again(spec.label, spec.inputs.values())
        call = {
            "stage": spec.stage,
            "label": spec.label,
            "config": config,
            "seed": self.seed if spec.seed is None else spec.seed,
            "stream": spec.stream,
            "rerun": self.journal.record.rerun if again else "",
            "needs": spec.needs,
            "accept": self.accept,
            "trust_remote_code": self.trust_remote_code,
            "passed": self.resources.passed,
        }
        retries = self.resources.stage_retries
        prepared = stage_task(spec.stage).with_options(
            task_run_name=spec.label, retries=retries, retry_delay_seconds=_delays(retries)
        )
        future = prepared.submit(call, inputs, len(self.steps), wait_for=[after.future] if after else None)
        may_fail = spec.may_fail or any(stage.may_fail for stage in needed)
        step = SubmittedStage(spec.label, future, self, again, needed, may_fail)
        self.steps.append(step)
        return step

    def wait(self, until: SubmittedStage | None = None) -> None:
        """Wait for all stages, or ``until`` one is done, and report each as it ends.

        Raises the first failure as soon as it happens, except of stages that may fail.
        """
        steps = {step.future.task_run_id: step for step in self.steps if step.label not in self.announced}
        for future in as_completed([step.future for step in steps.values()]):
            with suppress(BranchFailed):
                steps[future.task_run_id].ended()
            if until is not None and future is until.future:
                return

    def runs_again(self, label: str, inputs: Iterable[Any]) -> bool:
        """Whether a stage, or one that it depends on, is to run again although its result is known."""
        chosen = self.journal.record.from_stage
        named = chosen is not None and is_part(label, chosen)
        return named or any(isinstance(value, SubmittedStage) and value.again for value in inputs)


@dataclass(frozen=True)
class SubmittedStage:
    """A stage of a run: a :class:`~alignment_core.composition.graph.Step`."""

    label: str
    future: PrefectFuture[dict[str, Any]]
    run: Run
    again: bool = False
    """Whether it runs again although its result is known."""
    needed: tuple[SubmittedStage, ...] = ()
    """The stages that it waits for."""
    may_fail: bool = False
    """Whether the run continues if it fails."""
    name: str | None = None
    """The output that it stands for. Default: the default output."""

    def output(self, name: str) -> SubmittedStage:
        """The same stage, standing for another of its outputs."""
        return replace(self, name=name)

    def artifact(self) -> Reference:
        """The output that it stands for; waits for the stage."""
        return self.result().output(self.name)

    def result(self) -> StageResult:
        """Wait for the stage. Raises its own error, or that of another stage that fails meanwhile; BranchFailed if it may
        fail."""
        if self.label not in self.run.announced:
            self.run.wait(until=self)
        return self.ended()

    def ended(self) -> StageResult:
        """The result of a stage that is done; reported once. Raises its error."""
        try:
            value = self.future.result()
        except Exception as error:
            if not self.may_fail:
                raise
            raise self._failed(self.cause() or error) from error
        result = StageResult.model_validate(value).model_copy(update={"label": self.label})
        if self.label not in self.run.announced:
            self.run.announced.add(self.label)
            outputs = {name: str(reference) for name, reference in result.outputs.items()}
            details = {
                "reason": result.reason,
                "seconds": round(result.seconds, 3),
                "startup_seconds": result.cost.get("startup_seconds", 0.0),
                "waited_seconds": result.cost.get("waited_seconds", 0.0),
                "outputs": outputs,
                "made_by": result.key,
            }
            self.run.journal.stage(self.label, result.state, **details)
            for listener in self.run.listeners:
                listener.finished(result)
            for sentence in result.warnings:
                get_run_logger().warning("%s: %s", self.label, printable(sentence))
        return result

    def _failed(self, cause: Exception) -> Exception:
        """The error to raise for a stage that may fail. A failure of its own is reported once."""
        if isinstance(cause, Stopped):
            return cause
        if self.label not in self.run.announced:
            self.run.announced.add(self.label)
            if self.failure() is not None:
                sentence = f"failed; stages that do not need it continue: {str(cause).removeprefix(f'{self.label}: ')}"
                get_run_logger().error("%s %s", self.label, sentence)
                for listener in self.run.listeners:
                    listener.failed(self.label, sentence)
        return BranchFailed(cause)

    def cause(self) -> Exception | None:
        """The error with which the stage failed, or one that it needs."""
        return self.failure() or next((cause for stage in self.needed if (cause := stage.cause())), None)

    def failure(self) -> Exception | None:
        """The error with which the stage itself failed, if it did."""
        state = self.future.state
        if not (state.is_failed() or state.is_crashed()):
            return None
        try:
            state.result()
        except Exception as error:
            return error
        return None


@functools.cache
def stage_task(stage: str) -> Task[..., Any]:
    """The Prefect task of the stage module ``stage``. Prefect persists no results: the store is the cache, and a cached stage
    ends in the state ``Cached``.

    It has no tags: for each tagged run the client asks the server for concurrency slots, which a server on SQLite refuses
    while it writes events, so that most stages would begin 2 seconds late.
    """

    def body(fields: dict[str, Any], inputs: dict[str, Any], order: int) -> dict[str, Any] | State[dict[str, Any]]:
        run = cast(Run, current())
        call = _call(fields, inputs)
        logger = get_run_logger()
        label = call.label
        key = key_of(call)
        run.journal.stage(label, "running", stage=stage, key=key.value, key_parts=key.parts)
        result = result_of(run, call, key, order)
        logger.info(
            "%s: %s (%s), %s, %s",
            label,
            result.state,
            result.reason,
            result.times if result.state == "run" else "0.0 s",
            ", ".join(output.short for output in result.outputs.values()),
        )
        data = result.model_dump(mode="json")
        return Completed(name="Cached", data=data) if result.state == "cached" else data

    body.__name__ = stage
    body.__doc__ = f"Run the stage `{stage}`, unless its artifact is in the store."
    return task(
        name=stage.replace("_", "-"),
        cache_policy=NO_CACHE,
        persist_result=False,
        retry_condition_fn=_may_retry,
    )(body)


def _call(fields: Mapping[str, Any], inputs: Mapping[str, Any]) -> StageCall:
    """The stage call. An input is the text of a reference, or the result of another stage's task and the name of an output."""
    references: dict[str, Reference] = {}
    accepted: dict[str, dict[str, str]] = {}
    for role, value in inputs.items():
        if isinstance(value, str):
            references[role] = Reference.parse(value)
        else:
            result = StageResult.model_validate(value[0])
            references[role] = result.output(value[1])
            accepted |= {role: result.accepted} if result.accepted else {}
    return StageCall(**fields, inputs=references, accepted=accepted)


def _may_retry(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry only infrastructure failures: a wrong recipe or bad data would fail again."""
    try:
        state.result()
    except AlignmentError as error:
        return error.retryable
    except Exception:
        return False
    return False


def _delays(retries: int) -> list[float]:
    """Exponential backoff with full jitter (Prefect's own jitter factor has no effect)."""
    longest = [min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**attempt) for attempt in range(retries)]
    return [seconds * (0.5 + random.random() / 2) for seconds in longest]
