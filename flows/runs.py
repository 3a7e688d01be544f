"""The life of a run around its composition: open it, wait for its stages, and end it in order if it fails or is stopped."""

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

from alignment.flows import access
from alignment.flows.comparison import compare
from alignment.flows.host_log import in_run_log
from alignment.flows.outcome import outcome_of
from alignment.flows.planning import plan
from alignment.flows.preflight import COMMAND_LINE, CommandLine, check_from_stage, check_recipe
from alignment.flows.progress import ProgressArtifacts
from alignment.flows.run_page import leave_unfinished, only_shown
from alignment.flows.stale_runs import clear_page, close_not_begun, log_no_task_that_did_not_begin
from alignment.flows.state_watcher import Watch
from alignment.tasks.stage import Run
from alignment_core.artifacts import open_store, prune
from alignment_core.checks import traps
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import BranchFailed, Input, composing
from alignment_core.composition.results import Outputs
from alignment_core.credentials import refuse_literals, remember_variables
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.execution.description import recipe_files
from alignment_core.execution.key import packages_named
from alignment_core.home import align_home
from alignment_core.host.client import Host
from alignment_core.host.logs import prune_logs
from alignment_core.journal import Journal, earlier_names, in_use, new_record
from alignment_core.journal import prune as prune_journals
from alignment_core.recipes import BaseRecipe
from alignment_core.resolved_names import known_names, resolving
from alignment_core.tracking import Listener, file_trackers, listening, require
from alignment_core.tracking.metrics_file import MetricsFile
from alignment_core.tracking.openlineage import OpenLineageEvents, attempt_id

SETTLE_SECONDS = 5.0
"""Time for the tasks of a run that ends to reach their final states; their host is gone by then."""
LOST = 75
"""Exit code of a process whose run was taken over by another attempt."""


@dataclass
class OpenRun:
    """A run to which stages are submitted."""

    outputs: Outputs = field(default_factory=Outputs)
    """Results of its composition."""
    outcome: Any = None
    """An :class:`~alignment.flows.outcome.Outcome` as plain data once the run is complete; Prefect's state if it was
    cancelled."""

    def finish(
        self,
        policy: Input | None = None,
        evaluations: Evaluations | None = None,
        final: str | None = None,
        **others: Input | None,
    ) -> None:
        """Name the results of the run: the ``policy`` to promote, its label ``final`` in the ``evaluations``, and a
        ``reward_model`` or ``rollouts``."""
        report = evaluations.report() if evaluations else None
        baseline = evaluations.baseline[0] if evaluations and evaluations.baseline else None
        evaluated = {"final": final, "baseline": baseline, "report": report, "evaluations": evaluations}
        self.outputs = Outputs(policy=policy, **evaluated, **others)


def run_recipe(
    recipe: BaseRecipe,
    compose: Callable[[Any], Outputs],
    from_stage: str | None = None,
    lost: Callable[[], None] = lambda: None,
    notes: Sequence[str] = (),
) -> dict[str, Any] | State:
    """Run a composition with its own host; returns an :class:`~alignment.flows.outcome.Outcome` as plain data.

    Raises the first failure. A cancelled run returns Prefect's state. ``from_stage`` and its dependants run again.
    The promotion's tag moves only from the policy that the new one was compared with, see :mod:`alignment.flows.comparison`.
    ``lost`` is called before this process exits because another attempt owns the run. The report begins with ``notes``.
    """
    if COMMAND_LINE.get() is None:  # the command has checked the recipe before
        with resolving(earlier_names(str(flow_run().id))):
            warnings = check_recipe(recipe, open_store(recipe.store), from_stage).warnings
        for sentence in warnings:
            get_run_logger().warning("%s", sentence)

    with open_run(recipe, from_stage, planned(recipe), lost=lost, notes=notes) as opened:
        opened.outputs = compose(recipe)
    outcome: dict[str, Any] | State = opened.outcome
    return outcome


def planned(recipe: BaseRecipe) -> Callable[[Run], list[str]]:
    """Labels of all stages of a recipe, submitted or not."""
    return lambda run: [stage.label for stage in plan(recipe, run.store).stages]


def submitted(run: Run) -> list[str]:
    """Labels of the submitted stages of a run."""
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
    """Open a run with its own host. Stages are submitted inside the block, and done when it ends; see :func:`run_recipe`.

    ``labels`` gives the stages from which it may run again. ``called`` are fields of the journal that say how a user's flow was
    called. If the run is cancelled, the block ends without an error.
    """
    opened = OpenRun()
    log_no_task_that_did_not_begin()
    caller = COMMAND_LINE.get()
    for warning in traps.warnings(recipe):
        (caller.display.warn if caller else get_run_logger().warning)(warning)
        notes = (*notes, warning)
    with _running(recipe, from_stage, called, caller) as run:
        with Watch(run.journal.record.run_id, run.host.close) as watch:
            try:
                yield opened
                _check_from_stage(run, labels)
                run.wait()
                compared = compare(recipe, run.store, opened.outputs)
                run.wait()
                if compared.report is not None:
                    compared.report.result()  # raises for stages that may fail, too
            except BaseException as error:
                with sigterm_ignored():
                    run.host.close()  # first, because it wakes the stages that wait for an answer
                    if watch.lost:
                        with suppress(Exception):
                            lost()
                        os._exit(LOST)  # another attempt owns this run: exit without reporting
                    cancelled = watch.cancelled and isinstance(error, Stopped)
                    with suppress(OSError):  # before the slow steps: this process may be killed during them
                        run.journal.end("cancelled" if cancelled else None, error)
                    _settle(run)
                    cause = _cause(run, error)
                    _leave_unfinished(recipe, run, cause, cancelled, caller)
                    if cancelled:
                        opened.outcome = Cancelled(message="Cancelled; a later attempt continues from here.")
                        return
                    if isinstance(error, Exception):  # after Ctrl-C, end at once
                        _prune(recipe, run)
                    raise cause from None
        opened.outcome = outcome_of(recipe, run, opened.outputs, compared, notes).model_dump(mode="json")
        if caller is not None:
            caller.outcomes.append(opened.outcome)
        _prune(recipe, run)


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM while shutting down: a second one would interrupt the journal and the report."""
    try:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError:  # only the main thread may set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _settle(run: Run) -> None:
    """Wait briefly until the tasks of a run that ends have reached their final states."""
    deadline = time.monotonic() + SETTLE_SECONDS
    for step in run.steps:
        with suppress(Exception):  # a future may be cancelled
            step.future.wait(max(0.0, deadline - time.monotonic()))


def _leave_unfinished(
    recipe: BaseRecipe, run: Run, cause: BaseException, cancelled: bool, caller: CommandLine | None
) -> None:
    """Write the report of an incomplete run, and show its path on the terminal."""
    with (
        only_shown("stages that never began"),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(sync_client=True) as client,
    ):
        skipped = close_not_begun(client, run.steps)
    if skipped:
        get_run_logger().warning("not begun, because the run ended before: %s", ", ".join(skipped))
    report = leave_unfinished(recipe.name, run, cause, cancelled)
    if report and caller:
        with only_shown("where the run's report is", "not said"):
            caller.display.left(report)


def _prune(recipe: BaseRecipe, run: Run) -> None:
    """Apply the recipe's retention. Errors are logged and do not fail the run: a later run prunes the rest."""
    logger = get_run_logger()
    try:
        if recipe.retention.journal_days is not None:
            prune_journals(recipe.retention.journal_days)
        retention = recipe.retention
        used = in_use(but=run.journal.record.run_id)
        days = {"cache_days": None, "masters_days": retention.masters_days}
        pruned = prune(run.store, retention.progress_days, retention.rollouts_days, delete=True, used=used, **days)
    except Exception as error:
        logger.warning("nothing more was pruned: %s", error)
        return
    if pruned:
        logger.info("pruned %d objects, %.1f MiB", len(pruned), sum(garbage.size for garbage in pruned) / 2**20)


def flow_run() -> FlowRun:
    """The flow run of this process."""
    context = FlowRunContext.get()
    current = context.flow_run if context else None
    assert current is not None, "recipes run inside the flow"
    return current


@contextmanager
def _running(
    recipe: BaseRecipe, from_stage: str | None, called: Mapping[str, Any], caller: CommandLine | None
) -> Iterator[Run]:
    run_id = str(flow_run().id)
    content = recipe.model_dump(mode="json")
    refuse_literals(content)
    remember_variables(content)
    store = open_store(recipe.store)
    resumes = caller.resumes if caller else None
    rerun = (resumes.rerun if resumes and resumes.from_stage == from_stage else run_id) if from_stage else ""
    record = new_record(
        run_id,
        recipe.name,
        content,
        store.uri,
        from_stage=from_stage,
        rerun=rerun,
        deployed=flow_run().deployment_id is not None,
        server=os.environ.get(access.URL, ""),
        run_count=flow_run().run_count,
        overrides=caller.overrides if caller else (),
        resolved=known_names(),
        **called,
    )
    log = align_home() / "logs" / f"{run_id}.log"
    prune_logs(log.parent)
    early_host = caller.host if caller else None
    if early_host is not None:  # it started before the run had its id
        if log.exists():
            log.rename(log.with_suffix(f".{time.time():.0f}.log"))  # the log of an earlier attempt
        with suppress(FileNotFoundError):  # the host may not have written anything yet
            early_host.log.rename(log)
        early_host.log = log
    prewarm = ("trainers", "engines") if recipe.samples else ("trainers",)
    with Journal(record).open() as journal:
        if record.run_count > 1:  # only now: until the journal is open, the attempt before this one may still be alive
            with get_client(sync_client=True) as client:
                clear_page(client, flow_run().id, "the attempt that it belonged to is over")
        with (
            _listeners(recipe, journal, log, caller) as listeners,
            early_host or Host(store.uri, recipe.resources, log, recipe=recipe.name, prewarm=prewarm) as host,
        ):
            host.run_ids = {"prefect": run_id}
            if recipe.tracking.openlineage is not None:
                host.run_ids["openlineage"] = attempt_id(run_id, journal.record.attempt)
            host.recipe_files = recipe_files(recipe)
            host.overrides = _overrides(caller, called)
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
            # From here on the steps of compositions submit Prefect tasks: `submit` of composition/graph.py calls `run.submit`.
            with composing(run), resolving(journal.record.resolved, journal.resolved):
                yield run


def _overrides(caller: CommandLine | None, called: Mapping[str, Any]) -> tuple[str, ...]:
    """What the run changes in its recipe: by ``align run --set``, or in the form of a deployment. A user's own flow may have a
    parameter of that name, which is another thing."""
    if caller is not None:
        return caller.overrides
    given = () if called else flow_run().parameters.get("overrides") or ()
    return tuple(text for text in given if isinstance(text, str))


@contextmanager
def _listeners(
    recipe: BaseRecipe, journal: Journal, log: Path, caller: CommandLine | None
) -> Iterator[tuple[Listener, ...]]:
    """The console if there is one, the run's folder, its page in the Prefect UI, and the recipe's trackers."""
    require(recipe.tracking)
    warn = caller.display.warn if caller else get_run_logger().warning
    flow_run = UUID(journal.record.run_id)
    trackers: dict[str, Callable[[], Listener]] = {
        "progress artifacts": lambda: ProgressArtifacts(flow_run),
        "metrics.jsonl": lambda: MetricsFile(journal.folder),
    }
    target = recipe.tracking.openlineage
    if target is not None:
        trackers["OpenLineage"] = lambda: OpenLineageEvents(target, journal.record, journal.folder, warn)
    if caller:
        caller.display.opened(journal.record.run_id, recipe.name, str(journal.folder), str(log))
        for sentence in caller.warnings:
            caller.display.warn(sentence)
        trackers["console"] = lambda: caller.display
    with (
        suppress(_Incomplete),
        file_trackers(recipe, warn, journal.record.store) as files,
        listening({**trackers, **files}, warn) as listeners,
    ):
        yield listeners
        if journal.record.status != "running":
            raise _Incomplete


class _Incomplete(Exception):
    """Raised for the trackers alone if a run was cancelled: it is not complete, but the block raised no error."""


def _check_from_stage(run: Run, labels: Callable[[Run], list[str]]) -> None:
    """Raise UserError if no stage of the run, submitted or not, has the name from which it should run again."""
    chosen = run.journal.record.from_stage
    if chosen is None or any(step.again for step in run.steps):
        return
    check_from_stage(chosen, labels(run))


def _cause(run: Run, error: BaseException) -> BaseException:
    """The root failure: a stage whose input failed reports only that it could not begin."""
    if not isinstance(error, Exception):
        return error  # Ctrl-C, cancellation
    if isinstance(error, BranchFailed):
        return error.cause
    if isinstance(error, AlignmentError) and not isinstance(error, Stopped):
        return error
    failures = [failure for step in run.steps if (failure := step.failure()) is not None]
    return next((failure for failure in failures if not isinstance(failure, Stopped)), error)
