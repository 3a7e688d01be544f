"""A first recipe gates its promotion on its metrics: better than chance, or no worse than before."""

from __future__ import annotations

import pytest

from alignment_core.init.sections import promotion
from alignment_core.init.text import plain

HELD_OUT = {"data": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "held_out": True}]}}
JUDGED = {"evaluation": {"verifier": "math"}}


@pytest.mark.parametrize(
    ("method", "sections", "gates"),
    [
        ("dpo", {"dpo": HELD_OUT}, ["test_margin"]),
        ("dpo", {"dpo": {"data": {"test_rows": 20}}}, ["test_margin"]),
        ("dpo", {"dpo": {"data": {}}}, []),
        ("kto", {"kto": HELD_OUT}, ["test_accuracy"]),
        ("sft", {"sft": HELD_OUT}, ["test_loss"]),
        ("sft", {"sft": {"data": {}}}, []),
        ("sft", {"sft": HELD_OUT, **JUDGED}, ["test_loss", "win_rate.high"]),
        ("distillation", {"distillation": HELD_OUT}, ["test_loss"]),
        ("continued-pretraining", {"continued_pretraining": {"data": {"test_rows": 20}}}, ["test_loss"]),
        ("rl", {"rl": {}, **JUDGED}, ["accuracy"]),
        ("rl", {"rl": {}, "evaluation": {"rewards": [{"function": "rewards.py:f"}]}}, ["win_rate"]),
        ("iterative-dpo", {"reward_model": HELD_OUT, "evaluation": {}}, ["reward_model_accuracy"]),
    ],
)
def test_gates_of_a_first_recipe(method: str, sections: dict[str, object], gates: list[str]) -> None:
    chosen = plain(promotion("policy/first", method, sections))
    assert chosen["tag"] == "policy/first"
    assert [gate["metric"] for gate in chosen.get("gates", [])] == gates
