"""Which numbers of an evaluation are metrics of a model, in its card and bill of materials."""

from __future__ import annotations

from alignment_core.attestation.bom import intervals


def test_intervals_and_counts_beside_a_metric_are_no_metrics() -> None:
    """Of lm-eval's numbers, as :func:`alignment_core.evaluation.lm_eval_process.metrics_of` names them."""
    name = "lm_eval/gsm8k/exact_match@strict-match"
    beside = {f"{name}.stderr": 0.1, f"{name}.n": 8.0, f"{name}.higher_is_better": 1.0}
    accuracy = {"accuracy": 0.5, "accuracy.low": 0.25, "accuracy.high": 0.75, "accuracy.n": 16}
    metrics = [*intervals({"confidence": 0.95, **accuracy, name: 0.75, **beside})]
    assert metrics == [("accuracy", 0.5, (0.25, 0.75)), (name, 0.75, None)]
