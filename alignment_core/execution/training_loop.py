"""The loop of stages that train on fixed data: steps, checkpoints, held-out metrics, export. Shared by all methods."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alignment_core.artifacts.reference import MASTERS
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import NumericError
from alignment_core.execution.base import StageContext
from alignment_core.execution.curve import Curve
from alignment_core.execution.evaluation_checkpoints import EvaluationCheckpoints
from alignment_core.execution.intermediate_checkpoints import IntermediateCheckpoints
from alignment_core.execution.metric_window import MetricWindow
from alignment_core.execution.save_schedule import SaveSchedule
from alignment_core.models.masters import name_masters
from alignment_core.models.saving import ADAPTER
from alignment_core.training.checkpoints import curve_of, drop_incomplete, drop_older, newest_progress
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import open_job
from alignment_core.training.resumable import resume, save_progress
from alignment_core.training.step_report import StepReport
from alignment_core.training.trainer import Trainer, TrainJob

PARTS = (ADAPTER, MASTERS)
"""Folders in that of an exported model."""
REPORT_SECONDS = 1.0
"""Seconds for which the ranks train before they report."""


def run_job(context: StageContext, job: TrainJob, last: Path | None) -> dict[str, Any]:
    """Train a job to its end, and write the default output of its stage; returns metrics.

    ``last`` is the folder for the last checkpoint where the best one is another.
    """
    drop_incomplete(context.progress)
    with _name_last_good_checkpoint(context.progress), context.machines.trainers(context.ticket) as trainers:
        ranks = open_job(trainers, job, context.resources)
        state = resume([ranks], context.progress)
        on_start = job.training.eval_on_start and job.test_data is not None
        evaluations = EvaluationCheckpoints(
            context.progress, job.training, state["step"], state["total_steps"], on_start
        )
        checkpoints = IntermediateCheckpoints(context.progress, job.training, state["step"], state["total_steps"])
        step, metrics = _loop(context, ranks, state, evaluations, checkpoints)
        result = step if evaluations.best is None else evaluations.best
        if job.test_data and result not in evaluations.metrics:
            evaluations.metrics[result] = _averages(ranks.all(Trainer.evaluate))
            context.curve.add(step, "steps", _tested(evaluations.metrics[result]))
            context.reporter(step, state["total_steps"], "steps", _tested(evaluations.metrics[result]))
        if target := context.output if evaluations.best in (None, step) else last:
            _export(ranks, target, parts=target == context.output)
    if result != step:
        evaluations.link_best(context.output, job.model)
    checkpoints.link(context, job.model)
    if evaluations.best is not None:
        metrics["best_step"] = evaluations.best
    _move_parts(context)
    if job.test_data:
        metrics |= _tested(evaluations.metrics[result])
    metrics |= {f"{name}.first": value for name, value in _tested(evaluations.metrics.get(0, {})).items()}
    return {**metrics, "steps": step, "rows": state["rows"], "parameters": state["parameters"]}


def _move_parts(context: StageContext) -> None:
    """Move adapters and master weights out of the folder of the result: they are outputs of their own."""
    for part in PARTS:
        if (inside := context.output / part).is_dir():
            if part in context.outputs:
                inside.rename(context.outputs[part])  # which is empty
            else:
                shutil.rmtree(inside)
    if MASTERS in context.outputs and any(context.outputs[MASTERS].iterdir()):
        name_masters(context.output, context.outputs[MASTERS])


def _loop(
    context: StageContext,
    ranks: ActorGroup[Trainer],
    state: dict[str, Any],
    evaluations: EvaluationCheckpoints,
    checkpoints: IntermediateCheckpoints,
) -> tuple[int, dict[str, Any]]:
    """Take steps in slices of about a second, report them one by one, and evaluate and export between them where that is due.

    Returns the last step, and the averages of the last tenth of the steps and of the first.
    """
    step = first = state["step"]
    total = state["total_steps"]
    if step:
        _resume_curve(context, evaluations, step)
    elif 0 in evaluations.metrics:  # of an attempt that ended before its first checkpoint
        context.curve.add(0, "steps", _tested(evaluations.metrics[0]))
    context.report(step, total, "steps")
    # Before the first step or after a resume; all other evaluations are part of the report of their step.
    if tested := _evaluate(ranks, evaluations, step):
        context.report(step, total, "steps", **tested)
    schedule = SaveSchedule(context)
    started = time.monotonic()
    used = ranks.processor_seconds()
    window = MetricWindow(context.progress, step, total)
    tokens = computed = 0
    while step < total and not evaluations.stop:
        if checkpoints.is_due(step):
            checkpoints.add(step, partial(_export, ranks, parts=False))
        until = min(evaluations.next_after(step), checkpoints.next_after(step))
        reports = ranks.all(Trainer.train, until - step, REPORT_SECONDS)
        before = step
        step += reports[0].steps
        tokens += sum(report.tokens for report in reports)
        computed += sum(report.computed for report in reports)
        due = step < total and schedule.is_due
        speed = tokens / (time.monotonic() - started)
        measured: dict[int, dict[str, float]] = {}
        for number, of_step in enumerate(zip(*(report.each for report in reports), strict=True), start=before + 1):
            averages = _averages(of_step)
            first_rank = of_step[0]
            window.add(number, averages, sum(rank.normaliser for rank in of_step))
            rates = {"grad_norm": first_rank.grad_norm, "learning_rate": first_rank.learning_rate}
            measured[number] = {**averages, **rates, "tokens_per_second": speed}
            context.curve.add(number, "steps", measured[number])  # before the checkpoint, which holds the curve
        stops = context.stopping.is_set()
        if due or stops:
            _save(context, ranks, step, evaluations, schedule, window)
        for number, metrics in measured.items():
            if context.stopping.is_set() and not stops:  # set since the check above: the report ends the stage
                _save(context, ranks, step, evaluations, schedule, window)
                stops = True
            tested = _evaluate(ranks, evaluations, step) if number == step else {}
            context.report(number, total, "steps", **metrics, **tested)
    seconds = time.monotonic() - started
    context.cost.update(
        train_tokens=tokens,
        train_computed_tokens=computed,
        train_seconds=round(seconds, 3),
        train_processor_seconds=round(ranks.processor_seconds() - used, 3),
        train_steps=step - first,
    )
    return step, {**window.metrics(), "tokens_per_second": tokens / seconds if tokens else 0.0}


def _resume_curve(context: StageContext, evaluations: EvaluationCheckpoints, step: int) -> None:
    """Continue the curve of the checkpoint; held-out metrics may have been measured after it was written."""
    curve = Curve.from_bytes(curve_of(context.progress, step))
    for line in curve.lines:
        line["metrics"] |= _tested(evaluations.metrics.get(line["step"], {}))
    context.resume_curve(curve.to_bytes(), step)


def _evaluate(ranks: ActorGroup[Trainer], evaluations: EvaluationCheckpoints, step: int) -> dict[str, float]:
    """Evaluate on the held-out rows if that is due after so many steps; their metrics."""
    if not evaluations.is_due(step):
        return {}
    evaluations.add(step, _averages(ranks.all(Trainer.evaluate)), partial(_export, ranks))
    return _tested(evaluations.metrics[step])


def _tested(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of held-out rows under the names that they have beside those of training."""
    return {f"test_{name}": value for name, value in metrics.items()}


def _averages(reports: Sequence[StepReport]) -> dict[str, float]:
    """Sums over ranks and slices, divided by the normaliser of the loss."""
    normaliser = sum(report.normaliser for report in reports)
    names = sorted({name for report in reports for name in report.sums})
    return {name: sum(report.sums.get(name, 0.0) for report in reports) / max(normaliser, 1.0) for name in names}


@contextmanager
def _name_last_good_checkpoint(progress: Path) -> Iterator[None]:
    """Add the last good checkpoint to the text of a NumericError: the trainer writes none after a step that failed."""
    try:
        yield
    except NumericError as error:
        newest = newest_progress(progress)
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been written yet"
        raise NumericError(
            f"{error}. Check these rows, or lower training.learning_rate; {kept}, and nothing later is saved"
        ) from error


def _export(ranks: ActorGroup[Trainer], folder: Path, parts: bool = True) -> None:
    """Write the model, with ``parts`` also its adapters and master weights, which take twice its space."""
    write(ranks, [folder], Trainer.export, folder, parts)


def _save(
    context: StageContext,
    ranks: ActorGroup[Trainer],
    step: int,
    evaluations: EvaluationCheckpoints,
    schedule: SaveSchedule,
    window: MetricWindow,
) -> None:
    """Write a checkpoint, and remove older ones once it is complete."""
    with schedule.saving():
        window.save()
        save_progress([ranks], context.progress, context.curve.to_bytes())
        drop_older(context.progress, step)
        evaluations.checkpointed()
