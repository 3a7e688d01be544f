"""Which way a metric is better, wherever something is called the best."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from alignment_core.composition import steps
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.evaluation.gates import refusals
from alignment_core.evaluation.lm_eval_process import metrics_of
from alignment_core.execution.evaluation_checkpoints import EvaluationCheckpoints
from alignment_core.recipes import Gate, TrainingConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        # by their nature: divergences, negative log-likelihoods and their exponentials are costs
        *[(name, False) for name in ("loss", "nll", "kl", "test_loss", "test_kl", "test_perplexity", "kl.high")],
        *[(name, False) for name in ("length", "truncated", "test_loss.first", "reward_rejected", "critic_loss")],
        *[(name, True) for name in ("accuracy", "test_accuracy", "reward", "margin", "win_rate.low", "pass@4")],
        *[(name, True) for name in ("judged_win_rate", "reward_chosen", "reward_0", "a_metric_of_a_plugin")],
        # as the registry of lm-eval 0.4.13 has them (lm_eval/api/metrics.py)
        *[(f"lm_eval/wikitext/{name}", False) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        *[(f"lm_eval/t/{name}", False) for name in ("perplexity", "brier_score", "ter", "ter@strip")],
        *[(f"lm_eval/t/{name}", True) for name in ("acc", "acc_norm", "exact_match@strict-match", "bleu", "f1")],
    ],
)
def test_the_direction_of_a_metric(name: str, higher: bool) -> None:
    assert higher_is_better(name) is higher


def test_directions_of_lm_evals_metrics_come_from_its_tasks() -> None:
    """A custom task may state `higher_is_better: false` for any name; a group whose tasks disagree has None."""
    results = {
        "mine": {"toxicity,none": 0.25, "toxicity_stderr,none": 0.1, "perplexity,low": 3.0},
        "group": {"toxicity,none": 0.5},
    }
    stated: dict[str, dict[str, bool | None]] = {
        "mine": {"toxicity": False, "perplexity": True},
        "group": {"toxicity": None},
    }
    metrics = metrics_of(results, {"mine": {"effective": 4}}, stated)
    assert metrics == {
        "lm_eval/mine/toxicity": 0.25,
        "lm_eval/mine/toxicity.n": 4.0,
        "lm_eval/mine/toxicity.stderr": 0.1,
        "lm_eval/mine/toxicity.higher_is_better": 0.0,
        "lm_eval/mine/perplexity@low": 3.0,
        "lm_eval/mine/perplexity@low.n": 4.0,
        "lm_eval/mine/perplexity@low.higher_is_better": 1.0,
        "lm_eval/group/toxicity": 0.5,
    }
    assert not higher_is_better("lm_eval/mine/toxicity", metrics)
    assert higher_is_better("lm_eval/mine/perplexity@low", metrics)
    assert higher_is_better("lm_eval/group/toxicity", metrics), "by default"


def test_the_best_checkpoint_of_a_distillation_has_the_lowest_divergence(tmp_path: Path) -> None:
    looks = EvaluationCheckpoints(
        tmp_path, TrainingConfig(eval_steps=1, metric_for_best_model="kl", early_stopping_patience=2), 0, 4
    )
    for step, kl in enumerate((0.9, 0.2, 0.5, 0.7), start=1):
        looks.add(step, {"kl": kl}, lambda folder: folder.mkdir())
    assert looks.best == 2
    assert looks.stop, "two evaluations in a row were no better"


@pytest.mark.parametrize(
    ("metric", "measured", "best"),
    [
        ("lm_eval/wikitext/word_perplexity", {"a": 30.0, "b": 20.0, "c": 25.0}, "b"),
        ("lm_eval/mine/toxicity", {"a": 0.3, "b": 0.2, "c": 0.1}, "c"),
        ("lm_eval/wikitext/acc", {"a": 0.3, "b": 0.2, "c": 0.1}, "a"),
        ("kl", {"a": 3.0, "b": 2.0, "c": 1.0}, "c"),
    ],
)
def test_a_sweep_ranks_the_better_value_first(
    metric: str, measured: dict[str, float], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"lm_eval/mine/toxicity.higher_is_better": 0.0}
    of_steps: Any = {name: {metric: value, **stated} for name, value in measured.items()}
    monkeypatch.setattr(steps, "metrics", lambda step: of_steps[step])  # in place of runs that measured them
    monkeypatch.setattr(steps, "submit", lambda *arguments: arguments)
    measuring: Any = {name: name for name in measured}
    submitted: Any = steps.variants("variants", metric, {name: {} for name in measured}, measuring)
    config = submitted[2]
    worst_first = sorted(measured.values(), reverse=config.lower_is_better)
    assert worst_first[-1] == measured[best]


def test_a_gate_requires_a_gain_in_the_better_direction() -> None:
    """Perplexity 20 after 25: by hand a gain of 5, and 20 after 18 one of -2."""
    name = "lm_eval/wikitext/word_perplexity"
    gates = (Gate(metric=name, min_gain=4),)
    assert refusals(gates, {name: 20.0}, {name: 25.0}, "sft") == []
    assert refusals(gates, {name: 20.0}, {name: 18.0}, "sft") == [
        f"{name}, which should be low, gained -2 over sft, 6 less than the required 4"
    ]
    own = "lm_eval/mine/toxicity"
    stated = {own: 0.1, f"{own}.higher_is_better": 0.0}
    assert refusals((Gate(metric=own, min_gain=0.1),), stated, {own: 0.3}, "sft") == []


def test_no_other_module_has_a_list_of_directions() -> None:
    lists = [
        str(path.relative_to(ROOT))
        for top in ("alignment_core", "flows", "tasks")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and any("BETTER" in getattr(target, "id", "") for target in node.targets)
    ]
    assert lists == ["alignment_core/evaluation/directions.py"]
