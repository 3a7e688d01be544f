"""The promotion of a first recipe: its tag, and gates on what the recipe measures."""

from __future__ import annotations

from typing import Any

from alignment_core.init.text import Said, plain

TAG = "the name of the result in the store"


def promotion(tag: str, method: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The section `promotion`. Every gate asks for no more than to be better than chance, or no worse than before."""
    found, content = [], plain(sections)
    if method == "dpo" and _holds_out(content["dpo"]):
        found.append(Said({"metric": "test_margin", "min": 0.0001}, "on held-out pairs it prefers the better answers"))
    if method == "kto" and _holds_out(content["kto"]):
        found.append(Said({"metric": "test_accuracy", "min": 0.5}, "on held-out answers it tells good from bad"))
    if _holds_out(content.get("reward_model", {})):
        gate = {"metric": "reward_model_accuracy", "min": 0.55}
        found.append(Said(gate, "a reward model that knows no better than chance teaches nothing"))
        if "evaluation" in content and "verifier" not in content["evaluation"]:
            found.append(Said({"metric": "win_rate", "min": 0.5}, "by the reward model, against the start"))
    if "rewards" in content.get("evaluation", {}) and "verifier" not in content["evaluation"]:
        found.append(Said({"metric": "win_rate", "min": 0.5}, "by the reward functions, against the start"))
    if "verifier" in content.get("evaluation", {}):
        found.append(Said({"metric": "accuracy", "min_gain": 0}, "no worse than what the tag points to"))
    if not found:
        return {"tag": Said(tag, f"{TAG}; add `gates` that it must pass")}
    return {"tag": Said(tag, TAG), "gates": found}


def _holds_out(section: dict[str, Any]) -> bool:
    data = section.get("data", {})
    return bool(data.get("test_rows")) or any(one.get("held_out") for one in data.get("sources", ()))
