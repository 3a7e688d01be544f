"""``metrics.jsonl`` in the run's folder: every report of every stage, also after a crash."""

from __future__ import annotations

import json

from alignment_core.tracking import Progress
from alignment_core.tracking.metrics_file import METRICS, MetricsFile, read_points


def reports(folder, *steps: int, loss: float) -> None:
    file = MetricsFile(folder)
    file.progress("sft", Progress(0, 9, "rows", {}))
    for step in steps:
        file.progress("sft", Progress(step, 9, "steps", {"loss": loss, "grad_norm": None}))
    file.ended(True)


def test_each_report_is_a_line_with_its_stage_step_and_metrics(tmp_path):
    reports(tmp_path, 1, 2, loss=0.5)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(line["stage"], line["unit"], line["step"], line["metrics"]) for line in lines] == [
        ("sft", "steps", 1, {"loss": 0.5, "grad_norm": None}),
        ("sft", "steps", 2, {"loss": 0.5, "grad_norm": None}),
    ]


def test_steps_that_were_taken_again_count_once_and_a_cut_line_not_at_all(tmp_path):
    reports(tmp_path, 1, 2, 3, loss=0.5)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"stage": "sft", "step": 4, "met')
    reports(tmp_path, 2, 3, loss=0.25)
    assert read_points(tmp_path) == {"sft": [(1, {"loss": 0.5}), (2, {"loss": 0.25}), (3, {"loss": 0.25})]}
    assert read_points(tmp_path / "none") == {}
