"""Gates: passing policies, and the sentence with the missing amount for others."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from alignment_core.errors import UserError
from alignment_core.evaluation.gates import judged, refusals
from alignment_core.recipes import Gate
from alignment_core.recipes.base import REFUSE_UNUSED

METRICS = {"accuracy": 0.5, "kl": 12.0, "win_rate.low": 0.45}
BASELINE = {"accuracy": 0.4}


def check(**gate: object) -> list[str]:
    return refusals((Gate.model_validate(gate),), METRICS, BASELINE, "policy/production")


@pytest.mark.parametrize(
    "gate",
    [
        {"metric": "accuracy", "min": 0.5},
        {"metric": "kl", "max": 12},
        {"metric": "accuracy", "min": 0.1, "max": 0.9, "min_gain": 0.05},
        {"metric": "accuracy", "min_gain": -1},
    ],
)
def test_a_bound_that_is_reached_or_kept_passes(gate):
    assert check(**gate) == []


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ({"metric": "accuracy", "min": 0.75}, "accuracy is 0.5, 0.25 below the minimum of 0.75"),
        ({"metric": "kl", "max": 10}, "kl is 12, 2 above the maximum of 10"),
        (
            {"metric": "win_rate.low", "min": 0.5},
            "win_rate.low is 0.45 against policy/production, 0.05 below the minimum of 0.5",
        ),
        (
            {"metric": "accuracy", "min_gain": 0.3},
            "accuracy gained 0.1 over policy/production, 0.2 less than the required 0.3",
        ),
    ],
)
def test_a_refusal_has_the_measured_value_and_the_difference(gate, sentence):
    assert check(**gate) == [sentence]


def test_every_failed_condition_has_its_sentence():
    gates = (Gate(metric="accuracy", min=0.6, min_gain=0.5), Gate(metric="kl", max=20), Gate(metric="kl", max=1))
    assert [line.split()[0] for line in refusals(gates, METRICS, BASELINE, "sft")] == ["accuracy", "accuracy", "kl"]


def test_a_judged_gate_has_the_arithmetic_of_its_conditions():
    gates = (Gate(metric="accuracy", min_gain=0.05), Gate(metric="kl", max=10), Gate(metric="win_rate", min=0.4))
    metrics = METRICS | {"win_rate": 0.5, "win_rate.high": 0.55}
    gain, kl, wins = judged(gates, metrics, BASELINE, "policy/production")
    assert (gain.value, gain.before, gain.gain, gain.failures) == (0.5, 0.4, 0.1, ())
    assert (kl.value, kl.max, kl.before, len(kl.failures)) == (12.0, 10.0, None, 1)
    assert (wins.low, wins.value, wins.high) == (0.45, 0.5, 0.55)


def test_the_gain_of_a_metric_that_should_be_low_is_its_decrease():
    (loss,) = judged((Gate(metric="test_loss", min_gain=0.5),), {"test_loss": 4.0, "test_loss.first": 4.4}, {}, "")
    assert (loss.before, loss.value, loss.gain) == (4.4, 4.0, 0.4)
    (unknown,) = judged((Gate(metric="test_loss", min=0.5),), {}, {}, "")
    assert (unknown.value, unknown.failures) == (
        None,
        ("test_loss is not on record: the model was not trained here with held-out rows",),
    )


def test_a_policy_without_gates_passes():
    assert refusals((), {}, {}, "sft") == []


def test_an_unmeasured_metric_is_an_error_that_lists_the_measured_ones():
    with pytest.raises(UserError, match=r"'reward' was not measured; measured are: accuracy, kl, win_rate\.low$"):
        check(metric="reward", min=0)


def test_a_metric_that_is_no_number_passes_nothing():
    for bound in ("min", "max", "min_gain"):
        gate = Gate.model_validate({"metric": "accuracy", bound: 0.0})
        assert len(refusals((gate,), {"accuracy": float("nan")}, BASELINE, "sft")) == 1


def test_a_gain_that_is_just_reached_passes():
    """7 of 10 after 6 of 10 gain a tenth, although 0.7 - 0.6 is 0.09999999999999998 in binary; a nat less of 4.4 likewise."""
    gate = Gate(metric="accuracy", min_gain=0.1)
    assert refusals((gate,), {"accuracy": 0.7}, {"accuracy": 0.6}, "sft") == []
    assert len(refusals((gate,), {"accuracy": 0.699}, {"accuracy": 0.6}, "sft")) == 1
    lower = Gate(metric="test_loss", min_gain=0.1)
    assert refusals((lower,), {"test_loss": 4.3, "test_loss.first": 4.4}, {}, "sft") == []


@pytest.mark.parametrize(
    "metric", ["truncated.low", "baseline_perplexity.high", "reward_0.low", "lm_eval/task/acc.low"]
)
def test_a_gate_on_an_end_that_no_interval_has_is_refused_when_the_recipe_is_read(metric):
    with pytest.raises(ValidationError, match="has no interval: use the metric itself"):
        Gate.model_validate({"metric": metric, "max": 1}, context=REFUSE_UNUSED)


@pytest.mark.parametrize(
    "metric", ["pass@4.low", "kl_to_model.high", "length.high", "reward.low", "lm_eval/task/exact_match@strict-match"]
)
def test_a_gate_may_be_on_the_end_of_an_interval(metric):
    assert Gate(metric=metric, max=1).metric == metric
