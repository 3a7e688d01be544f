"""The one mechanism behind every stage task: its body asks the store, and then the run host."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Completed

from alignment.tasks.graph import CURRENT, BranchFailed, is_part
from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.credentials import refuse_literals
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.execution.base import StageCall, StageConfig, StageResult, load_stage
from alignment_core.execution.curve import Line
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import cached_result
from alignment_core.host.client import Host
from alignment_core.journal import Journal
from alignment_core.printable import printable
from alignment_core.recipes import ResourcesConfig
from alignment_core.tracking import Listener, Progress

FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 120.0


@dataclass
class Run:
    """What all stage tasks of one flow run share."""

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
    steps: list[Step] = field(default_factory=list)
    announced: set[str] = field(default_factory=set)
    """Labels of the stages of which it was said how they ended."""

    def __post_init__(self) -> None:
        self.lately = StoreSnapshot(self.store, uses=True)

    def submit(
        self,
        stage: str,
        label: str,
        config: StageConfig,
        inputs: Mapping[str, Step | Reference | None],
        stream: str = "",
        needs: tuple[str, ...] = (),
        after: Step | None = None,
        seed: int | None = None,
        may_fail: bool = False,
    ) -> Step:
        """Submit a stage as a task; inputs that are None are left out. The ``seed`` is the recipe's unless one is given.

        If a stage fails that ``may_fail``, the others continue. A stage that needs one that may fail may fail, too.
        """
        plain = config.model_dump(mode="json")
        refuse_literals(plain, label)
        config.check()  # what is wrong with it is said now, not when the stage's turn comes
        given = {
            role: [value.future, value.name] if isinstance(value, Step) else str(value)
            for role, value in inputs.items()
            if value is not None
        }
        retries = self.resources.stage_retries
        prepared = stage_task(stage).with_options(
            task_run_name=label, retries=retries, retry_delay_seconds=_delays(retries)
        )
        again = self.runs_again(label, inputs.values())
        asked = {
            "stage": stage,
            "label": label,
            "config": plain,
            "seed": self.seed if seed is None else seed,
            "stream": stream,
            "rerun": self.journal.record.rerun if again else "",
            "needs": needs,
            "accept": self.accept,
            "trust_remote_code": self.trust_remote_code,
            "passed": self.resources.passed,
        }
        future = prepared.submit(asked, given, len(self.steps), wait_for=[after.future] if after else None)
        needed = tuple(one for one in (*inputs.values(), after) if isinstance(one, Step))
        step = Step(label, future, self, again, needed, may_fail or any(one.may_fail for one in needed))
        self.steps.append(step)
        return step

    def wait(self, until: Step | None = None) -> None:
        """Wait for all stages, or ``until`` one is done, announcing each as it ends. Raises the first failure of any as soon as
        it happens, but for those that may fail."""
        steps = {step.future.task_run_id: step for step in self.steps if step.label not in self.announced}
        for future in as_completed([step.future for step in steps.values()]):
            with suppress(BranchFailed):
                steps[future.task_run_id].ended()
            if until is not None and future is until.future:
                return

    def runs_again(self, label: str, inputs: Iterable[Any]) -> bool:
        """Whether a stage is, or depends on one of, those that are to be run again on purpose."""
        chosen = self.journal.record.from_stage
        named = chosen is not None and is_part(label, chosen)
        return named or any(isinstance(value, Step) and value.again for value in inputs)


@dataclass(frozen=True)
class Step:
    """A stage that was submitted. Give it to other stages as an input, or ask it for its result."""

    label: str
    future: PrefectFuture[dict[str, Any]]
    run: Run
    again: bool = False
    """Whether it runs again on purpose."""
    needed: tuple[Step, ...] = ()
    """The stages that it waits for."""
    may_fail: bool = False
    """Whether the run continues if it fails."""
    name: str | None = None
    """The output that it stands for; None: the default one."""

    def output(self, name: str) -> Step:
        """The same stage, standing for another of its outputs."""
        return replace(self, name=name)

    def artifact(self) -> Reference:
        """The output that it stands for; waits for the stage."""
        return self.result().output(self.name)

    def result(self) -> StageResult:
        """Wait for the stage. Raises its own error, or that of another one that fails meanwhile; BranchFailed if it may
        fail."""
        if self.label not in self.run.announced:
            self.run.wait(until=self)
        return self.ended()

    def ended(self) -> StageResult:
        """What came of a stage that is done, which is announced once. Raises its error."""
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
            news = {
                "reason": result.reason,
                "seconds": round(result.seconds, 3),
                "startup_seconds": result.cost.get("startup_seconds", 0.0),
                "waited_seconds": result.cost.get("waited_seconds", 0.0),
                "outputs": outputs,
                "made_by": result.key,
            }
            self.run.journal.stage(self.label, result.state, **news)
            for listener in self.run.listeners:
                listener.finished(result)
            for sentence in result.warnings:
                get_run_logger().warning("%s: %s", self.label, printable(sentence))
        return result

    def _failed(self, cause: Exception) -> Exception:
        """What to raise for a stage that may fail; of one that failed itself it is announced once."""
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
        return self.failure() or next((cause for one in self.needed if (cause := one.cause())), None)

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
    """The Prefect task of the stage module ``stage``. Prefect keeps no results of it: what is cached the store decides, and the
    task's state says so.

    It has no tags: for each tagged run the client asks the server for concurrency slots, which a server on SQLite refuses
    while it writes events, so that most stages began 2 seconds late.
    """

    def body(asked: dict[str, Any], inputs: dict[str, Any], order: int) -> dict[str, Any] | State[dict[str, Any]]:
        run: Run = CURRENT.get()
        call, logger = _call(asked, inputs), get_run_logger()
        label = call.label
        key = key_of(call)
        run.journal.stage(label, "running", stage=stage, key=key.value, key_parts=key.parts)
        result = cached_result(run.lately(), call, key)
        if result is None:
            for listener in run.listeners:
                listener.started(label)
            logger.info("%s starts", label)
            shows = load_stage(stage).shows

            def on_progress(message: dict[str, Any]) -> None:
                progress = Progress(message["done"], message["total"], message["unit"], message["metrics"], shows)
                run.journal.progress(label, progress.done, progress.total, progress.unit)
                for listener in run.listeners:
                    listener.progress(label, progress)

            def on_wait(reason: str | None) -> None:
                run.journal.waits(label, reason)
                for listener in run.listeners:
                    listener.waits(label, reason)
                logger.info("%s waits for %s", label, reason) if reason else logger.info("%s continues", label)

            def on_resumed(lines: list[Line]) -> None:
                for listener in run.listeners:
                    listener.resumed(label, lines)

            def on_warning(sentence: str) -> None:
                run.journal.restart(label, sentence)
                for listener in run.listeners:
                    listener.warned(label, sentence)
                logger.warning("%s: %s", label, sentence)

            def on_start(what: str | None) -> None:
                for listener in run.listeners:
                    listener.starts(label, what)

            try:
                result = run.host.run(call, on_progress, order, on_wait, key, on_resumed, on_warning, on_start)
            except AlignmentError as error:
                run.journal.stage(label, "stopped" if isinstance(error, Stopped) else "failed", reason=str(error))
                context, retries = TaskRunContext.get(), run.resources.stage_retries
                if error.retryable and context and (number := context.task_run.run_count) <= retries:
                    on_warning(f"{error}; retry {number} of {retries}, in a new run host")
                raise
        logger.info(
            "%s: %s (%s), %s, %s",
            label,
            result.state,
            result.reason,
            result.times if result.state == "run" else "0.0 s",
            ", ".join(one.short for one in result.outputs.values()),
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


def _call(asked: Mapping[str, Any], inputs: Mapping[str, Any]) -> StageCall:
    """The stage call; an input is a reference's text, or the result of another stage's task and the name of an output."""
    references: dict[str, Reference] = {}
    accepted: dict[str, dict[str, str]] = {}
    for role, value in inputs.items():
        if isinstance(value, str):
            references[role] = Reference.parse(value)
        else:
            result = StageResult.model_validate(value[0])
            references[role] = result.output(value[1])
            accepted |= {role: result.accepted} if result.accepted else {}
    return StageCall(**asked, inputs=references, accepted=accepted)


def _may_retry(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Only infrastructure failures: trying a wrong recipe or bad data again gives the same answer."""
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
