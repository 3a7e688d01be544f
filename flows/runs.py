"""The life of a run around its composition: open it, wait for its stages, promote, and return the outcome that is printed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled
from pydantic import BaseModel

from alignment.flows import access
from alignment.flows.comparison import Compared, compare, measured_in_training
from alignment.flows.costs import run_cost
from alignment.flows.host_log import in_run_log
from alignment.flows.planning import plan
from alignment.flows.preflight import COMMAND_LINE, CommandLine, check_from_stage, check_recipe
from alignment.flows.progress import ProgressArtifacts
from alignment.flows.run_page import leave_report, leave_tables, leave_unfinished, only_shown
from alignment.flows.stale_runs import clear_page, close_not_begun, log_no_task_that_did_not_begin
from alignment.flows.state_watcher import Watch
from alignment.tasks.promotion import promote, publish
from alignment.tasks.stage import Run
from alignment_core.artifacts import Reference, open_store, prune
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import BranchFailed, Input, composing
from alignment_core.composition.results import Outputs
from alignment_core.credentials import refuse_literals, remember_variables
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.evaluation.gates import warnings
from alignment_core.execution.base import StageResult
from alignment_core.execution.key import packages_named
from alignment_core.home import align_home
from alignment_core.host.client import Host
from alignment_core.host.logs import prune_logs
from alignment_core.journal import Journal, in_use, new_record
from alignment_core.journal import prune as prune_journals
from alignment_core.recipes import BaseRecipe
from alignment_core.reporting.run_report import policies_of
from alignment_core.tracking import Listener, file_trackers, listening, require
from alignment_core.tracking.metrics_file import MetricsFile

SETTLE_SECONDS = 5.0
"""How long the stages of a run that ends may take to say how they ended: their host is gone by then."""
LOST = 75
"""Exit code of a process whose run was taken over by another attempt."""


class Outcome(BaseModel):
    """Outcome of a run: the JSON object that ``align run --json`` prints last."""

    status: str
    run_id: str
    store: str
    stages: list[StageResult] = []
    outputs: dict[str, str] = {}
    cost: dict[str, float] = {}
    """Sums over the stages that ran; see :mod:`alignment_core.execution.cost`."""
    metrics: dict[str, Any] = {}
    promotion: dict[str, Any] | None = None
    night: dict[str, Any] | None = None
    given_up: list[dict[str, Any]] = []
    """Entries of the ledger of nights for rows that this night has given up."""
    failed: dict[str, str] = {}
    """Why stages failed that other branches of the run did not need, by label; the status is ``partly failed`` then."""
    report: str | None = None
    """The run's report with curves, text and lineage, as Markdown; the same as one HTML page lies beside it."""
    error: str | None = None


@dataclass
class OpenRun:
    """A run that takes stages."""

    outputs: Outputs = field(default_factory=Outputs)
    """What its composition hands back."""
    outcome: Any = None
    """An :class:`Outcome` as plain data, once the run is complete; Prefect's state for it if somebody cancelled the run."""

    def finish(
        self,
        policy: Input | None = None,
        evaluations: Evaluations | None = None,
        final: str | None = None,
        **others: Input | None,
    ) -> None:
        """Name the results: the ``policy`` that may be promoted, the ``evaluations`` of the run's policies, among which it is
        called ``final``, and ``reward_model`` and ``rollouts``."""
        report = evaluations.report() if evaluations else None
        baseline = evaluations.baseline[0] if evaluations and evaluations.baseline else None
        judged = {"final": final, "baseline": baseline, "report": report, "evaluations": evaluations}
        self.outputs = Outputs(policy=policy, **judged, **others)


def run_recipe(
    recipe: BaseRecipe,
    compose: Callable[[Any], Outputs],
    from_stage: str | None = None,
    lost: Callable[[], None] = lambda: None,
    notes: Sequence[str] = (),
) -> dict[str, Any] | State:
    """Run a composition with its own host; returns an :class:`Outcome` as plain data. Raises the first failure.

    A run that somebody cancelled returns Prefect's state for that. ``from_stage`` and what depends on it run again. The
    promotion's tag is moved from what its policy was compared with, see :mod:`alignment.flows.comparison`. ``lost`` is called
    before this process exits because another attempt owns the run; the report begins with ``notes``.
    """
    if COMMAND_LINE.get() is None:  # else the command has done it
        for sentence in check_recipe(recipe, open_store(recipe.store), from_stage).warnings:
            get_run_logger().warning("%s", sentence)

    with open_run(recipe, from_stage, planned(recipe), lost=lost, notes=notes) as opened:
        opened.outputs = compose(recipe)
    outcome: dict[str, Any] | State = opened.outcome
    return outcome


def planned(recipe: BaseRecipe) -> Callable[[Run], list[str]]:
    """Labels of the stages of a recipe, also of those yet to come."""
    return lambda run: [one.label for one in plan(recipe, run.store).stages]


def submitted(run: Run) -> list[str]:
    """Labels of the stages of a run that has them all."""
    return [step.label for step in run.steps]


@contextmanager
def open_run(
    recipe: BaseRecipe,
    from_stage: str | None = None,
    labels: Callable[[Run], list[str]] = submitted,
    called: Mapping[str, Any] = {},
    lost: Callable[[], None] = lambda: None,
    notes: Sequence[str] = (),
) -> Iterator[OpenRun]:
    """A run with its own host, for as long as its stages are submitted and then until all are done; see :func:`run_recipe`.

    ``labels`` are those from which it may run again, ``called`` is what the journal says of a flow that is not ours. Where
    somebody cancels the run, the block ends there, quietly.
    """
    opened = OpenRun()
    log_no_task_that_did_not_begin()
    caller = COMMAND_LINE.get()
    for warning in warnings(recipe):
        (caller.display.warn if caller else get_run_logger().warning)(warning)
        notes = (*notes, warning)
    with _running(recipe, from_stage, called) as run:
        with Watch(run.journal.record.run_id, run.host.close) as watch:
            try:
                yield opened
                _check_from_stage(run, labels)
                run.wait()
                compared = compare(recipe, run.store, opened.outputs)
                run.wait()
            except BaseException as error:
                with sigterm_ignored():
                    run.host.close()  # first: it wakes the stages that wait for an answer
                    if watch.lost:
                        with suppress(Exception):
                            lost()
                        os._exit(LOST)  # whatever this process said now would be about somebody else's attempt
                    cancelled = watch.cancelled and isinstance(error, Stopped)
                    with suppress(OSError):  # now: whoever ended this run may not wait for what follows
                        run.journal.end("cancelled" if cancelled else None, error)
                    _settle(run)
                    cause = _cause(run, error)
                    _leave_unfinished(recipe, run, cause, cancelled)
                    if cancelled:
                        opened.outcome = Cancelled(message="Cancelled; a later attempt continues from here.")
                        return
                    if isinstance(error, Exception):  # whoever interrupts does not want to wait
                        _prune(recipe, run)
                    raise cause from None
        opened.outcome = _outcome(recipe, run, opened.outputs, compared, notes).model_dump(mode="json")
        if (caller := COMMAND_LINE.get()) is not None:
            caller.outcomes.append(opened.outcome)
        _prune(recipe, run)


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Hear no SIGTERM: to be told once more to end would cut off what a run that ends still has to say."""
    try:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _settle(run: Run) -> None:
    """Let the stages of a run that ends say how they ended, which those that only wait for them do, too."""
    deadline = time.monotonic() + SETTLE_SECONDS
    for step in run.steps:
        with suppress(Exception):  # of a future that was cancelled
            step.future.wait(max(0.0, deadline - time.monotonic()))


def _leave_unfinished(recipe: BaseRecipe, run: Run, cause: BaseException, cancelled: bool) -> None:
    """The report of a run that is not complete; whoever waits at a terminal is told where it lies."""
    with (
        only_shown("stages that never began"),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(sync_client=True) as client,
    ):
        skipped = close_not_begun(client, run.steps)
    if skipped:
        get_run_logger().warning("not begun, because the run ended before: %s", ", ".join(skipped))
    report, caller = leave_unfinished(recipe.name, run, cause, cancelled), COMMAND_LINE.get()
    if report and caller:
        with only_shown("where the run's report is", "not said"):
            caller.display.left(report)


def _prune(recipe: BaseRecipe, run: Run) -> None:
    """Apply the recipe's retention. What cannot be dropped now, a later run will: it never fails this one."""
    logger = get_run_logger()
    try:
        if recipe.retention.journal_days is not None:
            prune_journals(recipe.retention.journal_days)
        days, used = recipe.retention, in_use(but=run.journal.record.run_id)
        pruned = prune(run.store, days.progress_days, days.rollouts_days, delete=True, used=used)
    except Exception as error:
        logger.warning("nothing more was pruned: %s", error)
        return
    if pruned:
        logger.info("pruned %d objects, %.1f MiB", len(pruned), sum(one.size for one in pruned) / 2**20)


def flow_run() -> FlowRun:
    """The flow run of this process."""
    context = FlowRunContext.get()
    current = context.flow_run if context else None
    assert current is not None, "recipes run inside the flow"
    return current


@contextmanager
def _running(recipe: BaseRecipe, from_stage: str | None, called: Mapping[str, Any]) -> Iterator[Run]:
    run_id, content = str(flow_run().id), recipe.model_dump(mode="json")
    refuse_literals(content)
    remember_variables(content)
    store = open_store(recipe.store)
    caller = COMMAND_LINE.get()
    resumes = caller.resumes if caller else None
    again = (resumes.rerun if resumes and resumes.from_stage == from_stage else run_id) if from_stage else ""
    record = new_record(
        run_id,
        recipe.name,
        content,
        store.uri,
        from_stage=from_stage,
        rerun=again,
        deployed=flow_run().deployment_id is not None,
        server=os.environ.get(access.URL, ""),
        run_count=flow_run().run_count,
        overrides=caller.overrides if caller else (),
        **called,
    )
    log = align_home() / "logs" / f"{run_id}.log"
    prune_logs(log.parent)
    early = caller.host if caller else None
    if early is not None:  # it started before the run had its id
        if log.exists():
            log.rename(log.with_suffix(f".{time.time():.0f}.log"))  # of an earlier attempt
        with suppress(FileNotFoundError):  # a host that was not needed yet has written nothing
            early.log.rename(log)
        early.log = log
    with Journal(record).open() as journal:
        if record.run_count > 1:  # not before the journal is open: the attempt before this one may live until then
            with get_client(sync_client=True) as client:
                clear_page(client, flow_run().id, "the attempt that it belonged to is over")
        with (
            _listeners(recipe, journal, log, caller) as listeners,
            early or Host(store.uri, recipe.resources, log, recipe=recipe.name, samples=recipe.samples) as host,
        ):
            host.run_ids = {"prefect": run_id}
            host.follow(in_run_log(get_run_logger()))
            run = Run(
                store=store,
                host=host,
                resources=recipe.resources,
                seed=recipe.seed,
                accept=packages_named(recipe.reuse_across_versions, "reuse_across_versions"),
                journal=journal,
                trust_remote_code=recipe.model.trust_remote_code,
                listeners=listeners,
            )
            with composing(run):
                yield run


@contextmanager
def _listeners(
    recipe: BaseRecipe, journal: Journal, log: Path, caller: CommandLine | None
) -> Iterator[tuple[Listener, ...]]:
    """The console, where there is one, the run's folder and page in the Prefect UI, and the recipe's own trackers."""
    require(recipe.tracking)
    warn = caller.display.warn if caller else get_run_logger().warning
    flow_run = UUID(journal.record.run_id)
    trackers: dict[str, Callable[[], Listener]] = {
        "progress artifacts": lambda: ProgressArtifacts(flow_run),
        "metrics.jsonl": lambda: MetricsFile(journal.folder),
    }
    if caller:
        caller.display.opened(journal.record.run_id, recipe.name, str(journal.folder), str(log))
        for sentence in caller.warnings:
            caller.display.warn(sentence)
        trackers["console"] = lambda: caller.display
    with (
        suppress(_Incomplete),
        file_trackers(recipe, warn) as files,
        listening({**trackers, **files}, warn) as listeners,
    ):
        yield listeners
        if journal.record.status != "running":
            raise _Incomplete


class _Incomplete(Exception):
    """Tells the trackers, and nobody else, of a run that was cancelled: it did not complete, but nothing was raised."""


def _check_from_stage(run: Run, labels: Callable[[Run], list[str]]) -> None:
    """Raise UserError if no stage of the run has the name from which it should run again, also of those yet to come."""
    chosen = run.journal.record.from_stage
    if chosen is None or any(step.again for step in run.steps):
        return
    check_from_stage(chosen, labels(run))


def _cause(run: Run, error: BaseException) -> BaseException:
    """The failure that started it all: a stage whose input failed reports only that it could not begin."""
    if not isinstance(error, Exception):
        return error  # Ctrl-C, cancellation
    if isinstance(error, BranchFailed):
        return error.cause
    if isinstance(error, AlignmentError) and not isinstance(error, Stopped):
        return error
    failures = [failure for step in run.steps if (failure := step.failure()) is not None]
    return next((failure for failure in failures if not isinstance(failure, Stopped)), error)


def _outcome(recipe: BaseRecipe, run: Run, outputs: Outputs, compared: Compared, notes: Sequence[str] = ()) -> Outcome:
    failed, stages = _failed(run), [step.result() for step in run.steps if step.cause() is None]
    report = compared.report.result() if compared.report else None
    metrics: dict[str, Any] = {**report.metrics, "policies": policies_of(run.store, report)} if report else {}
    policies = metrics.get("policies", {})
    promotion = None
    if recipe.promotion and outputs.policy is not None:
        final = {**measured_in_training(run.store, outputs), **policies.get(compared.final, {})}
        baseline = policies.get(compared.baseline, {})
        policy, expected = reference_of(outputs.policy), compared.expected
        beside = compared.beside(recipe.promotion.tag)
        promotion = promote(recipe.promotion, policy, final, baseline, beside, expected, compared.problem)
        promotion["compared_with"] = (
            compared.baseline if any(gate.compares for gate in recipe.promotion.gates) else None
        )
        if recipe.promotion.publish and promotion["state"] in ("promoted", "unchanged"):
            promotion["publication"] = publish(recipe.promotion, policy)
    named = {
        "policy": outputs.policy,
        "reward_model": outputs.reward_model,
        "rollouts": outputs.rollouts,
        "report": compared.report,
    }
    references = {name: reference_of(step) for name, step in named.items() if step is not None}
    if outputs.summary is not None:
        metrics |= outputs.summary.result().metrics
    if not metrics and stages:
        metrics = dict(stages[-1].metrics)
    leave_tables(stages, metrics)
    return Outcome(
        status="partly failed" if failed else "completed",
        run_id=run.journal.record.run_id,
        store=run.store.uri,
        stages=stages,
        cost=run_cost(stages),
        outputs={name: str(reference) for name, reference in references.items()},
        metrics=metrics,
        promotion=promotion,
        failed=failed,
        report=leave_report(recipe.name, run, stages, references, promotion, notes, failed),
    )


def _failed(run: Run) -> dict[str, str]:
    """Why stages failed without ending the run, by label. Those that need them get a final state in Prefect."""
    failed = {step.label: str(error) for step in run.steps if (error := step.failure()) is not None}
    if failed:
        with only_shown("stages that never began"), get_client(sync_client=True) as client:
            close_not_begun(client, run.steps)
    return failed


def reference_of(value: Input) -> Reference:
    """The artifact behind an input."""
    return value if isinstance(value, Reference) else value.artifact()
