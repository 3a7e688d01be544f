"""Key metrics of a stage: means over the first and last tenth of its steps."""

from __future__ import annotations

import pytest

from alignment_core.execution.metric_window import MetricWindow


def go(window: MetricWindow, step: int, stop: int) -> None:
    """Take steps one by one; each one's loss is its number."""
    while step < stop:
        step += 1
        window.add(step, {"loss": float(step)})


def test_means_of_the_first_and_the_last_tenth(tmp_path):
    window = MetricWindow(tmp_path, 0, 40)
    go(window, 0, 40)
    assert window.metrics() == {"loss": (37 + 38 + 39 + 40) / 4, "loss.first": (1 + 2 + 3 + 4) / 4}


def test_steps_count_by_their_weight_and_a_metric_that_is_missing_does_not(tmp_path):
    window = MetricWindow(tmp_path, 0, 20)
    window.add(1, {"loss": 1.0, "kl": 0.5}, weight=3)
    window.add(2, {"loss": 5.0}, weight=1)
    window.add(19, {})
    window.add(20, {"loss": 0.5, "kl": 0.1})
    assert window.metrics() == {"loss": 0.5, "kl": 0.1, "loss.first": 2.0, "kl.first": 0.5}


def test_final_metrics_of_an_early_stop_are_of_its_last_steps(tmp_path):
    window = MetricWindow(tmp_path, 0, 40)
    go(window, 0, 20)
    assert window.metrics() == {"loss": (17 + 18 + 19 + 20) / 4, "loss.first": (1 + 2 + 3 + 4) / 4}


def test_a_resumed_attempt_keeps_the_first_metrics_of_the_earlier_attempt(tmp_path):
    go(MetricWindow(tmp_path, 0, 40), 0, 10)
    window = MetricWindow(tmp_path, 10, 40)
    go(window, 10, 40)
    assert window.metrics()["loss.first"] == 2.5


def test_an_attempt_that_saw_a_part_of_the_first_steps_reports_no_first_metrics(tmp_path):
    go(MetricWindow(tmp_path, 0, 40), 0, 2)
    window = MetricWindow(tmp_path, 2, 40)
    go(window, 2, 40)
    assert window.metrics() == {"loss": 38.5}


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_few_steps(tmp_path, steps):
    window = MetricWindow(tmp_path, 0, steps)
    go(window, 0, steps)
    assert window.metrics() == ({"loss": 1.0} if steps == 1 else {"loss": float(steps), "loss.first": 1.0})
