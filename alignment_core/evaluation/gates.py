"""Gates: conditions on metrics that a promotion must pass, and by how much each of them fails."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.recipes import BaseRecipe, Gate

GATES = {
    "test_margin": "{metric: test_margin, min: 0.0001}",
    "test_accuracy": "{metric: test_accuracy, min: 0.5}",
    "test_loss.first": "{metric: test_loss, min_gain: 0}",
    "reward_model_accuracy": "{metric: reward_model_accuracy, min: 0.55}",
}
"""Gates on metrics of training that a policy should always pass: better than chance, or than before, on held-out rows."""
DECIMALS = 9
"""Decimals of a gain: those of metrics. In binary 0.7 - 0.6 is less than 0.1."""


class JudgedGate(BaseModel):
    """A gate, what it compared, and why it failed."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    metric: str
    min: float | None = None
    max: float | None = None
    min_gain: float | None = None
    value: float | None = None
    """The metric of the policy; None if it is not on record."""
    low: float | None = None
    high: float | None = None
    """Ends of its interval, if it has one."""
    before: float | None = None
    """What a gain is measured from: the same metric of the other policy, or at the start of the training."""
    gain: float | None = None
    """By how much the metric is better than ``before``, whichever direction is better."""
    failures: tuple[str, ...] = ()
    """A sentence for each condition that fails."""


def judged(
    gates: tuple[Gate, ...], metrics: Mapping[str, float], baseline: Mapping[str, float], beside: str
) -> list[JudgedGate]:
    """The gates with what they measured, and one sentence per condition that fails: the metric, its value, and the difference
    to the limit.

    ``beside`` names the policy of ``baseline`` and of comparing metrics such as the win rate. A metric of training gains over
    ``<name>.first`` among ``metrics``; one that was not measured fails, too. Raises UserError if a gate names a metric of the
    evaluation that was not measured.
    """
    return [_judged(gate, metrics, baseline, beside) for gate in gates]


def refusals(
    gates: tuple[Gate, ...], metrics: Mapping[str, float], baseline: Mapping[str, float], beside: str
) -> list[str]:
    """The sentences of all gates that fail, see :func:`judged`."""
    return [sentence for gate in judged(gates, metrics, baseline, beside) for sentence in gate.failures]


def _judged(gate: Gate, metrics: Mapping[str, float], baseline: Mapping[str, float], beside: str) -> JudgedGate:
    limits = gate.model_dump(include={"metric", "min", "max", "min_gain"})
    if gate.is_of_training and gate.metric not in metrics:
        reason = f"{gate.metric} is not on record: the model was not trained here with held-out rows"
        return JudgedGate(**limits, failures=(reason,))
    failed: list[str] = []
    value = _measured(gate.metric, metrics)
    interval = {name: metrics[end] for name in ("low", "high") if (end := f"{gate.metric}.{name}") in metrics}
    measured = f"{gate.metric} is {value:.4g}" + (f" against {beside}" if "win_rate" in gate.metric else "")
    if gate.min is not None and not value >= gate.min:
        failed.append(f"{measured}, {gate.min - value:.4g} below the minimum of {gate.min:g}")
    if gate.max is not None and not value <= gate.max:
        failed.append(f"{measured}, {value - gate.max:.4g} above the maximum of {gate.max:g}")
    before = gain = None
    if gate.min_gain is not None:
        first = f"{gate.metric}.first"
        if gate.is_of_training and first not in metrics:
            failed.append(f"{first} is not on record: the training did not measure its start (`eval_on_start`)")
        else:
            before = metrics[first] if gate.is_of_training else _measured(gate.metric, baseline)
            start = "the start of training" if gate.is_of_training else beside
            higher = higher_is_better(gate.metric, metrics)
            gain = round(value - before if higher else before - value, DECIMALS)
            if not gain >= gate.min_gain:
                failed.append(
                    f"{gate.metric}{'' if higher else ', which should be low,'} gained {gain:.4g} over {start}, "
                    f"{gate.min_gain - gain:.4g} less than the required {gate.min_gain:g}"
                )
    return JudgedGate(**limits, **interval, value=value, before=before, gain=gain, failures=tuple(failed))


def warnings(recipe: BaseRecipe) -> list[str]:
    """Warnings about a recipe's gates before it runs: there are none, or one may never hold."""
    judge = getattr(recipe, "reward_model", None)
    gates = recipe.promotion.gates if recipe.promotion else ()
    sentence = _ungated(recipe)
    sentences = [sentence] if sentence else []
    if judge is not None and judge.model is not None and any(gate.metric == "reward_model_accuracy" for gate in gates):
        sentences.append(
            "promotion.gates: reward_model_accuracy is known only for a reward model that was trained into this store with "
            f"held-out pairs; if {judge.model.name} was not, the policy will not be promoted"
        )
    return sentences


def _ungated(recipe: BaseRecipe) -> str | None:
    """A warning about a promotion without gates, with suitable ones; None if there are gates."""
    if recipe.promotion is None or recipe.promotion.gates:
        return None
    fitting = [GATES[name] for name in recipe.measured_in_training if name in GATES]
    if recipe.evaluation and recipe.evaluation.verifier is not None:
        fitting.append("{metric: accuracy, min_gain: 0}")
    how = (
        f"add some, such as {' or '.join(fitting)}"
        if fitting
        else "hold rows out, or add an `evaluation`, and gate on it"
    )
    return f"promotion.gates: there are none, so {recipe.promotion.tag} moves to every new policy, whatever its metrics: {how}"


def _measured(name: str, metrics: Mapping[str, float]) -> float:
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise UserError(f"promotion.gates: metric {name!r} was not measured; measured are: {known}")
    return float(metrics[name])
