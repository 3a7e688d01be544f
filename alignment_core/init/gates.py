"""The promotion of a first recipe: its tag, and gates on the metrics that the recipe measures."""

from __future__ import annotations

from typing import Any

from alignment_core.init.text import Commented, plain

TAG = "the name of the result in the store"


def promotion(tag: str, method: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The section `promotion`. Its gates require a result better than chance, or no worse than the tag's."""
    gates, content = [], plain(sections)
    evaluation = content.get("evaluation")
    if method == "dpo" and _holds_out(content["dpo"]):
        gates.append(
            Commented({"metric": "test_margin", "min": 0.0001}, "prefers the better answers of held-out pairs")
        )
    if method == "kto" and _holds_out(content["kto"]):
        gates.append(Commented({"metric": "test_accuracy", "min": 0.5}, "tells good from bad held-out answers"))
    judge = "reward functions" if evaluation and "rewards" in evaluation else None
    if _holds_out(content.get("reward_model", {})):
        judge = "reward model"
        gate = {"metric": "reward_model_accuracy", "min": 0.55}
        gates.append(Commented(gate, "a reward model that is no better than chance teaches nothing"))
    if evaluation is not None and "verifier" in evaluation:
        gates.append(Commented({"metric": "accuracy", "min_gain": 0}, "no worse than the model with the tag"))
    elif evaluation is not None and judge:
        gates.append(Commented({"metric": "win_rate", "min": 0.5}, f"against the initial policy, by the {judge}"))
    if not gates:
        return {"tag": Commented(tag, f"{TAG}; add `gates` that it must pass")}
    return {"tag": Commented(tag, TAG), "gates": gates}


def _holds_out(section: dict[str, Any]) -> bool:
    data = section.get("data", {})
    return bool(data.get("test_rows")) or any(source.get("held_out") for source in data.get("sources", ()))
