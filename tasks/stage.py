"""The one mechanism behind every stage task: its cache key is the stage key, its body asks the run host."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture

from alignment_core.artifacts import Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.execution.base import StageCall, StageConfig, StageResult, load_stage
from alignment_core.execution.key import key_parts
from alignment_core.execution.runner import cached_result
from alignment_core.host.client import Host
from alignment_core.journal import Journal
from alignment_core.recipes import ResourcesConfig
from alignment_core.tracking import Listener, Progress
from tasks.graph import CURRENT, is_part

FIRST_RETRY_SECONDS = 2.0
LONGEST_RETRY_SECONDS = 120.0


@dataclass
class Run:
    """What all stage tasks of one flow run share."""

    store: Store
    host: Host
    results: Path
    """Where Prefect keeps the (small) results: inside the store, so that they outlive Prefect's database."""
    resources: ResourcesConfig
    seed: int
    journal: Journal
    listeners: tuple[Listener, ...] = ()
    steps: list[Step] = field(default_factory=list)
    announced: set[str] = field(default_factory=set)
    """Labels of the stages of which it was said how they ended."""

    def submit(
        self,
        stage: str,
        label: str,
        config: StageConfig,
        inputs: Mapping[str, Step | Reference | None],
        stream: str = "",
        needs: tuple[str, ...] = (),
    ) -> Step:
        """Submit a stage as a task; inputs that are None are left out."""
        config.content()  # what is wrong with it is said now, not when the stage's turn comes
        given = {
            role: [value.future, value.name] if isinstance(value, Step) else str(value)
            for role, value in inputs.items()
            if value is not None
        }
        retries = self.resources.stage_retries
        prepared = stage_task(stage).with_options(
            task_run_name=label, retries=retries, retry_delay_seconds=_delays(retries), result_storage=self.results
        )
        settings = config.model_dump(mode="json")
        again = self.runs_again(label, inputs.values())
        rerun = self.journal.record.rerun if again else ""
        future = prepared.submit(
            label=label,
            config=settings,
            inputs=given,
            seed=self.seed,
            stream=stream,
            rerun=rerun,
            needs=needs,
            order=len(self.steps),
        )
        step = Step(label, future, self, again)
        self.steps.append(step)
        return step

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
    name: str | None = None
    """The output that it stands for; None: the default one."""

    def output(self, name: str) -> Step:
        """The same stage, standing for another of its outputs."""
        return replace(self, name=name)

    def artifact(self) -> Reference:
        """The output that it stands for; waits for the stage."""
        return self.result().output(self.name)

    def result(self) -> StageResult:
        """Wait for the stage. Raises the stage's own error."""
        value = self.future.result()
        result = StageResult.model_validate(value).model_copy(update={"label": self.label})
        if self.future.state.name == "Cached":
            result = result.model_copy(update={"state": "cached", "reason": "same key", "seconds": 0.0})
        if self.label not in self.run.announced:
            self.run.announced.add(self.label)
            outputs = {name: str(reference) for name, reference in result.outputs.items()}
            news = {"reason": result.reason, "seconds": round(result.seconds, 3), "outputs": outputs}
            self.run.journal.stage(self.label, result.state, **news)
            for listener in self.run.listeners:
                listener.finished(result)
            for sentence in result.warnings:
                get_run_logger().warning("%s: %s", self.label, sentence)
        return result

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
def stage_task(stage: str) -> Task[..., dict[str, Any]]:
    """The Prefect task of the stage module ``stage``.

    It has no tags: for each tagged run the client asks the server for concurrency slots, which a server on SQLite refuses
    while it writes events, so that most stages began 2 seconds late.
    """

    def body(
        label: str,
        config: dict[str, Any],
        inputs: dict[str, Any],
        seed: int,
        stream: str,
        rerun: str,
        needs: tuple[str, ...],
        order: int,
    ) -> dict[str, Any]:
        run: Run = CURRENT.get()
        settings = {"label": label, "config": config, "seed": seed, "stream": stream, "rerun": rerun, "needs": needs}
        call = _call(stage, {**settings, "inputs": inputs})
        logger = get_run_logger()
        result = cached_result(run.store, call)
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
                logger.info("%s waits for %s", label, reason) if reason else logger.info("%s goes on", label)

            try:
                result = run.host.run(call, on_progress, order, on_wait)
            except AlignmentError as error:
                run.journal.stage(label, "stopped" if isinstance(error, Stopped) else "failed", reason=str(error))
                raise
        logger.info(
            "%s: %s (%s), %.1f s, %s",
            label,
            result.state,
            result.reason,
            result.seconds,
            ", ".join(one.short for one in result.outputs.values()),
        )
        return result.model_dump(mode="json")

    def cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
        run: Run = CURRENT.get()
        call = _call(stage, parameters)
        parts = key_parts(call)
        key = digest_of(parts)
        run.journal.stage(call.label, "running", stage=stage, key=key, key_parts=parts)
        if run.store.find(key, call.needs) is None:  # a Prefect record whose artifact is gone is no hit
            (run.results / key).unlink(missing_ok=True)
        return key

    body.__name__ = stage
    body.__doc__ = f"Run the stage `{stage}`, unless its artifact is in the store."
    return task(
        name=stage.replace("_", "-"),
        cache_policy=CacheKeyFnPolicy(cache_key_fn=cache_key),
        persist_result=True,
        result_serializer="json",
        retry_condition_fn=_may_retry,
    )(body)


def _call(stage: str, parameters: Mapping[str, Any]) -> StageCall:
    """The stage call; an input is a reference's text, or the result of another stage's task and the name of an output."""
    inputs = {
        role: Reference.parse(value)
        if isinstance(value, str)
        else StageResult.model_validate(value[0]).output(value[1])
        for role, value in parameters["inputs"].items()
    }
    return StageCall(
        stage=stage,
        label=parameters["label"],
        config=parameters["config"],
        inputs=inputs,
        seed=parameters["seed"],
        stream=parameters["stream"],
        rerun=parameters["rerun"],
        needs=parameters["needs"],
    )


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
