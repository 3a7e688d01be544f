"""Gates: conditions on metrics that a promotion must pass, and how far each is from holding."""

from __future__ import annotations

from collections.abc import Mapping

from alignment_core.errors import UserError
from alignment_core.evaluation.directions import higher_is_better
from alignment_core.recipes import Gate


def refusals(
    gates: tuple[Gate, ...], metrics: Mapping[str, float], baseline: Mapping[str, float], beside: str
) -> list[str]:
    """One sentence per condition that does not hold: its name, what was measured, and by how much it failed.

    ``beside`` says in words what ``baseline`` and comparing metrics such as the win rate were measured on.
    Raises UserError if a gate names a metric that was not measured.
    """
    failed: list[str] = []
    for gate in gates:
        value = _measured(gate.metric, metrics)
        measured = f"{gate.metric} is {value:.4g}" + (f" against {beside}" if "win_rate" in gate.metric else "")
        if gate.min is not None and not value >= gate.min:
            failed.append(f"{measured}, {gate.min - value:.4g} below the minimum of {gate.min:g}")
        if gate.max is not None and not value <= gate.max:
            failed.append(f"{measured}, {value - gate.max:.4g} above the maximum of {gate.max:g}")
        if gate.min_gain is not None:
            higher = higher_is_better(gate.metric, metrics)
            change = value - _measured(gate.metric, baseline)
            gain = change if higher else -change
            if not gain >= gate.min_gain:
                failed.append(
                    f"{gate.metric}{'' if higher else ', which should be low,'} gained {gain:.4g} over {beside}, "
                    f"{gate.min_gain - gain:.4g} less than the required {gate.min_gain:g}"
                )
    return failed


def _measured(name: str, metrics: Mapping[str, float]) -> float:
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise UserError(f"promotion.gates: metric {name!r} was not measured; measured are: {known}")
    return float(metrics[name])
