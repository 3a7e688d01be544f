"""Calling a stage from its task: the result is found in the store or computed by the run host, and listeners are notified."""

from __future__ import annotations

from typing import Any, Protocol

from prefect import get_run_logger
from prefect.context import TaskRunContext

from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.execution.base import StageCall, StageResult, load_stage
from alignment_core.execution.curve import Line
from alignment_core.execution.key import StageKey
from alignment_core.execution.runner import cached_result
from alignment_core.host.client import Host
from alignment_core.journal import Journal
from alignment_core.recipes import ResourcesConfig
from alignment_core.tracking import Listener, Progress


class Caller(Protocol):
    """What the run of a stage provides."""

    host: Host
    journal: Journal
    listeners: tuple[Listener, ...]
    resources: ResourcesConfig
    snapshot: StoreSnapshot


def result_of(run: Caller, call: StageCall, key: StageKey, order: int) -> StageResult:
    """The result of a call; listeners get its beginning and its end, whether it is run, cached or fails."""
    for listener in run.listeners:
        listener.requested(call, key.value)
    try:
        result = cached_result(run.snapshot(), call, key) or _run(run, call, key, order)
    except BaseException as error:
        if _retry(run, error) is None:
            for listener in run.listeners:
                listener.raised(call.label, error)
        raise
    for listener in run.listeners:
        listener.produced(result)
    return result


def _run(run: Caller, call: StageCall, key: StageKey, order: int) -> StageResult:
    """Run a call in the run host, and pass on what it reports."""
    label = call.label
    logger = get_run_logger()
    for listener in run.listeners:
        listener.started(label)
    logger.info("%s starts", label)
    shows = load_stage(call.stage).shows

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
        return run.host.run(call, on_progress, order, on_wait, key, on_resumed, on_warning, on_start)
    except AlignmentError as error:
        run.journal.stage(label, "stopped" if isinstance(error, Stopped) else "failed", reason=str(error))
        if (number := _retry(run, error)) is not None:
            on_warning(f"{error}; retry {number} of {run.resources.stage_retries}, in a new run host")
        raise


def _retry(run: Caller, error: BaseException) -> int | None:
    """The number of the retry that follows an error of a stage's task; None if there is none."""
    context = TaskRunContext.get()
    if not isinstance(error, AlignmentError) or not error.retryable or context is None:
        return None
    number = context.task_run.run_count
    return number if number <= run.resources.stage_retries else None
