"""The curve of a stage is whole after a resume: each step once, also on another machine, and in every tracker.

The expected numbers are those of an uninterrupted run: resuming changes no measurement.
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from alignment_core.artifacts import Store, open_store
from alignment_core.artifacts.attachments import attachment
from alignment_core.errors import Stopped
from alignment_core.execution.base import StageCall, StageContext, StageResult
from alignment_core.execution.curve import CURVE, Curve, Line
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.stages.sft import SftStageConfig
from alignment_core.tracking import Progress
from alignment_core.tracking.metrics_file import METRICS, MetricsFile
from tests.stages.killing import store_with

STEPS = 6


def points(lines: list[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]


def test_steps_after_the_checkpoint_are_dropped_and_metrics_of_one_step_are_merged() -> None:
    curve = Curve()
    for step in (1, 2, 3):
        curve.add(step, "steps", {"loss": 4.0 - step})
    curve.add(2, "steps", {"loss": 2.5})  # the stage went back to the checkpoint of step 1
    curve.add(2, "steps", {"test_loss": 9.0, "perplexity": float("inf")})
    assert points(curve.lines, "loss") == [(1, 3.0), (2, 2.5)]
    assert curve.lines[1]["metrics"] == {"loss": 2.5, "test_loss": 9.0, "perplexity": None}
    assert Curve.from_bytes(curve.to_bytes() + b'{"step": 3, "met').lines == curve.lines
    assert points(curve.up_to(1).lines, "loss") == [(1, 3.0)]


def test_metrics_file_of_a_resumed_run_in_another_home_has_every_step_once(tmp_path: Path) -> None:
    saved = Curve()
    for step in (1, 2, 3):
        saved.add(step, "steps", {"loss": 1 / step})
    file = MetricsFile(tmp_path)
    file.progress("data", Progress(5, 9, "rows", {"tokens": 1.0}))
    file.resumed("sft", saved.lines)
    file.progress("sft", Progress(4, 6, "steps", {"loss": 0.25}))
    file.ended(True)
    lines = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
    assert points([line for line in lines if line["stage"] == "sft"], "loss") == [
        (1, 1),
        (2, 1 / 2),
        (3, 1 / 3),
        (4, 0.25),
    ]
    assert [line["stage"] for line in lines].count("data") == 1


def test_metrics_file_of_a_resumed_run_in_the_same_home_has_every_step_once(tmp_path: Path) -> None:
    saved = Curve()
    for step in (1, 2):
        saved.add(step, "steps", {"loss": 1 / step})
    killed = MetricsFile(tmp_path)
    for step in (1, 2, 3, 4):
        killed.progress("sft", Progress(step, 6, "steps", {"loss": 7.0}))
    again = MetricsFile(tmp_path)
    again.resumed("sft", saved.lines)
    for step in (3, 4):
        again.progress("sft", Progress(step, 6, "steps", {"loss": 1 / step}))
    again.ended(True)
    lines = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
    assert points(lines, "loss") == [(1, 1), (2, 1 / 2), (3, 1 / 3), (4, 0.25)]


@pytest.fixture
def sft(machines: Any, tiny_model: Any, tmp_path: Path) -> Any:
    """Train for six steps, one row each, with held-out rows measured at first and after every second step; each step saves."""
    texts = [byte_tokenizer()(f"{number}+{number}={2 * number}")["input_ids"] for number in range(STEPS)]
    rows = pa.table({"input_ids": texts, "loss_mask": [[1] * len(ids) for ids in texts]})
    store, model, _ = store_with(tmp_path / "first", tiny_model(), rows)
    shutil.copy(tmp_path / "first" / "data" / "train.parquet", tmp_path / "first" / "data" / "test.parquet")
    data = store.publish(tmp_path / "first" / "data", "dataset")
    training = TrainingConfig(batch_size=1, learning_rate=1e-3, eval_steps=2)
    resources = ResourcesConfig(
        device="cpu", trainers=1, kv_cache_mib=16, zero_stage=1, wait_timeout_seconds=120, progress_seconds=1e-3
    )

    def run(
        used: Store, reporter: Any, resumed: Any = None, stopping: threading.Event | None = None, rerun: str = ""
    ) -> StageResult:
        config = SftStageConfig(training=training).model_dump(mode="json")
        inputs = {"model": model, "data": data}
        call = StageCall(stage="sft", label="sft", config=config, inputs=inputs, rerun=rerun)
        return run_stage(
            StageRequest(
                used,
                call,
                machines(1),
                resources,
                reporter,
                resumed=resumed or (lambda _: None),
                stopping=stopping or threading.Event(),
            )
        )

    return store, run


@pytest.mark.slow
def test_resumed_training_on_another_machine_has_the_curve_of_an_uninterrupted_run(
    sft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alignment_core.execution import training_loop

    monkeypatch.setattr(training_loop, "REPORT_SECONDS", 0.0)  # a slice and a checkpoint for each step
    store, run = sft
    stopping = threading.Event()
    whole = run(store, lambda *_: None, rerun="whole")
    expected = Curve.from_bytes(attachment(store, whole.reference, CURVE) or b"").lines
    assert [step for step, _ in points(expected, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points(expected, "test_loss")] == [0, 2, 4, 6]

    with pytest.raises(Stopped):
        run(store, lambda done, *_: stopping.set() if done == 4 else None, stopping=stopping)
    elsewhere = shutil.copytree(tmp_path / "first" / "store", tmp_path / "elsewhere" / "store", symlinks=True)
    other, metrics_file, steps_reported = open_store(elsewhere), MetricsFile(tmp_path), list[Any]()

    def report(done: float, total: float | None, unit: str, metrics: Any) -> None:
        steps_reported.append(done)
        metrics_file.progress("sft", Progress(done, total, unit, metrics))

    result = run(other, report, lambda lines: metrics_file.resumed("sft", lines))
    metrics_file.ended(True)
    assert min(steps_reported) > 1, "it was resumed from a checkpoint"
    lines = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
    saved = Curve.from_bytes(attachment(other, result.reference, CURVE) or b"").lines
    for name in ("loss", "test_loss", "learning_rate"):
        assert len(points(lines, name)) == len(points(expected, name)), f"{name}: each step once"
        assert dict(points(lines, name)) == pytest.approx(dict(points(expected, name)), abs=1e-6)
        assert points(saved, name) == points(lines, name)


def test_a_stage_reports_the_curve_of_its_checkpoint_before_its_own_steps(tmp_path: Path) -> None:
    saved, steps_reported = Curve(), list[Any]()
    for step in (1, 2, 3):
        saved.add(step, "steps", {"loss": 1 / step})
    context = StageContext(
        inputs={},
        references={},
        outputs={},
        progress=tmp_path,
        seed=0,
        resources=ResourcesConfig(),
        machines=None,  # type: ignore[arg-type]  # it is not asked for any
        reporter=lambda done, *_: steps_reported.append(done),
        resumed=lambda lines: steps_reported.extend(line["step"] for line in lines),
    )
    context.resume_curve(saved.to_bytes(), 2)
    context.report(3, 6, "steps", loss=0.3)
    assert steps_reported == [1, 2, 3]
    assert points(context.curve.lines, "loss") == [(1, 1), (2, 1 / 2), (3, 0.3)]
