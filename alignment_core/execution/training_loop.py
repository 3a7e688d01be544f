"""Driving the trainer ranks through one job: progress, checkpoints, held-out metrics, export. Shared by all methods."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.errors import DataError, NumericError, UserError
from alignment_core.execution.base import StageContext
from alignment_core.execution.curve import Curve
from alignment_core.execution.evaluation_checkpoints import Looks
from alignment_core.execution.metric_window import Course, unmoved
from alignment_core.models.saving import ADAPTER
from alignment_core.training.checkpoints import curve_of, drop_incomplete, drop_older, newest_progress

if TYPE_CHECKING:
    from alignment_core.recipes.sections.preference import ReferenceSyncConfig
    from alignment_core.training.learner import StepReport
    from alignment_core.training.methods.base import Method
    from alignment_core.training.trainer_ranks import TrainerRanks

REPORT_SECONDS = 1.0
LAST = "last"
"""Output of the last checkpoint, where the best one is another."""
TRAINED = {"model": "model", LAST: "model", ADAPTER: "adapter"}
"""The outputs of a stage that trains a policy; ``adapter`` of one with LoRA."""
TRAINING_PACKAGES = ("deepspeed", "jinja2", "torch", "transformers")


def train(
    context: StageContext,
    method: Method,
    training: Any,
    model: str = "model",
    test_before: bool = False,
    sync: ReferenceSyncConfig | None = None,
    dropout: bool = False,
) -> dict[str, Any]:
    """Train the input of role ``model`` on the input ``data``; returns metrics.

    A method that needs a reference compares with the input ``reference_logps``, which the stage of this name makes of the same
    data. Raises DataError if rows that the training takes are missing in it. With ``test_before`` the metrics of held-out rows
    before the first step are there as ``test_<name>.first``. With ``sync`` the reference is the input ``reference``, or the
    model itself, and follows the policy. With ``dropout`` the model's own dropout is on.
    """
    from alignment_core.training.trainer import TrainJob
    from alignment_core.training.trainer_ranks import TrainerRanks

    fixed = method.needs_reference and sync is None
    if fixed and "reference_logps" not in context.inputs:
        raise UserError(
            "the method compares with a reference: give its stage the input reference_logps, which the stage of this name "
            "makes (alignment.tasks.training.reference_logps)"
        )
    data = context.inputs["data"]
    if not (data / "train.parquet").is_file():
        raise DataError("the data set holds no training rows")
    job = TrainJob(
        method=method,
        model=context.model(model),
        reference_logps=context.inputs["reference_logps"] / "logps.parquet" if fixed else None,
        train_data=data / "train.parquet",
        test_data=data / "test.parquet" if (data / "test.parquet").is_file() else None,
        training=training,
        seed=context.seed,
        reference=context.model("reference") if "reference" in context.inputs else None,
        sync=sync,
        scratch=context.progress,
        dropout=dropout,
    )
    drop_incomplete(context.progress)
    if training.eval_steps and job.test_data is None:
        raise UserError("training.eval_steps: the data holds out no rows; set its `test_rows`, or leave the field out")
    with _kept_on_numeric_error(context.progress), context.machines.trainers(context.ticket) as trainers:
        ranks = TrainerRanks(trainers, job, context.resources)
        state = ranks.prepare(context.progress)
        before = test_before and job.test_data is not None
        looks = Looks(context.progress, training, state["step"], state["total_steps"], before)
        step, metrics = _loop(context, ranks, state, looks)
        result = step if looks.best is None else looks.best
        if job.test_data and result not in looks.taken:
            looks.taken[result] = _averages(ranks.evaluate())
            context.curve.add(step, "steps", _tested(looks.taken[result]))
            context.reporter(step, state["total_steps"], "steps", _tested(looks.taken[result]))
        if target := context.output if looks.best in (None, step) else context.outputs.get(LAST):
            ranks.export(target)
    if result != step:
        looks.link_best(context.output)
    if looks.best is not None:
        metrics["best_step"] = looks.best
    _move_adapters(context)
    if job.test_data:
        metrics |= _tested(looks.taken[result])
    metrics |= {f"{name}.first": value for name, value in _tested(looks.taken.get(0, {})).items()}
    if warnings := unmoved(context.inputs[model], context.output):
        metrics["warnings"] = warnings
    return {**metrics, "steps": step, "rows": state["rows"], "parameters": state["parameters"]}


def _move_adapters(context: StageContext) -> None:
    """Out of the folders of the models: those of the result into an output of their own."""
    for folder in context.outputs.values():
        if (inside := folder / ADAPTER).is_dir():
            if folder == context.output and ADAPTER in context.outputs:
                shutil.copytree(inside, context.outputs[ADAPTER], dirs_exist_ok=True)
            shutil.rmtree(inside)


def _loop(
    context: StageContext, ranks: TrainerRanks, state: dict[str, Any], looks: Looks
) -> tuple[int, dict[str, Any]]:
    """Steps in slices of about a second, reported one by one, with looks between them.

    Returns after which step it ended, and the averages of their last tenth and their first.
    """
    step, total = state["step"], state["total_steps"]
    if step:
        _resume_curve(context, looks, step)
    context.report(step, total, "steps")
    saved = started = time.monotonic()
    course = Course(context.progress, step, total)
    tokens, first = 0, step
    while True:
        if tested := _look(
            ranks, looks, step
        ):  # before the first step or after a resume; otherwise it came with the step
            context.report(step, total, "steps", **tested)
        if step == total or looks.stop:
            break
        reports = ranks.train(looks.next_after(step) - step, REPORT_SECONDS)
        before, step = step, step + reports[0].steps
        tokens += sum(report.tokens for report in reports)
        due = step < total and time.monotonic() - saved > context.resources.progress_seconds
        speed = tokens / (time.monotonic() - started)
        measured: dict[int, dict[str, float]] = {}
        for number, of_step in enumerate(zip(*(report.each for report in reports), strict=True), start=before + 1):
            averages, first_rank = _averages(of_step), of_step[0]
            course.add(number, averages, sum(rank.normaliser for rank in of_step))
            rates = {"grad_norm": first_rank.grad_norm, "learning_rate": first_rank.learning_rate}
            measured[number] = {**averages, **rates, "tokens_per_second": speed}
            context.curve.add(number, "steps", measured[number])  # before the checkpoint, which holds the curve
        stops = context.stopping.is_set()
        if due or stops:
            _save(context, ranks, step, looks)
            saved = time.monotonic()
        for number, metrics in measured.items():
            if context.stopping.is_set() and not stops:  # since a moment ago: the report ends the stage
                _save(context, ranks, step, looks)
                stops = True
            tested = _look(ranks, looks, step) if number == step else {}
            context.report(number, total, "steps", **metrics, **tested)
    seconds = time.monotonic() - started
    context.cost.update(
        train_tokens=tokens,
        train_seconds=round(seconds, 3),
        train_steps=step - first,
    )
    return step, {**course.metrics(), "tokens_per_second": tokens / seconds if tokens else 0.0}


def _resume_curve(context: StageContext, looks: Looks, step: int) -> None:
    """Continue the curve of the checkpoint; held-out metrics may have been measured after it was written."""
    curve = Curve.from_bytes(curve_of(context.progress, step))
    for line in curve.lines:
        line["metrics"] |= _tested(looks.taken.get(line["step"], {}))
    context.resume_curve(curve.to_bytes(), step)


def _look(ranks: TrainerRanks, looks: Looks, step: int) -> dict[str, float]:
    """Look at the held-out rows if that is due after so many steps; their metrics."""
    if not looks.is_due(step):
        return {}
    looks.take(step, _averages(ranks.evaluate()), ranks.export)
    return _tested(looks.taken[step])


def _tested(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of held-out rows, as they are called beside those of training."""
    return {f"test_{name}": value for name, value in metrics.items()}


def _averages(reports: Sequence[StepReport]) -> dict[str, float]:
    """Sums over ranks and slices, divided by what the loss is divided by."""
    normaliser = sum(report.normaliser for report in reports)
    names = sorted({name for report in reports for name in report.sums})
    return {name: sum(report.sums.get(name, 0.0) for report in reports) / max(normaliser, 1.0) for name in names}


@contextmanager
def _kept_on_numeric_error(progress: Path) -> Iterator[None]:
    """A NumericError also says where the last good checkpoint is: the trainer writes none after a step that failed."""
    try:
        yield
    except NumericError as error:
        newest = newest_progress(progress)
        kept = f"the last good checkpoint is {newest}" if newest else "no checkpoint had been written yet"
        raise NumericError(
            f"{error}. Check these rows, or lower training.learning_rate; {kept}, and nothing later is saved"
        ) from error


def _save(context: StageContext, ranks: TrainerRanks, step: int, looks: Looks) -> None:
    """Write a checkpoint; the older ones go once it is complete."""
    ranks.save_progress(context.progress, context.curve.to_bytes())
    drop_older(context.progress, step)
    looks.checkpointed()
