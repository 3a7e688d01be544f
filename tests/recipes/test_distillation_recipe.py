"""Recipes of distillation: inconsistent fields."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.contents import refusal

SECTION: dict[str, Any] = {"teacher": {"model": "big"}, "data": "rows.jsonl"}
RECIPE: dict[str, Any] = {"method": "distillation", "name": "demo", "model": "m"}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"teacher": {"model": "big"}},
            "`distillation` needs text: `data` (given), `on_policy` (the student's own), or both",
        ),
        ({"data": "rows.jsonl"}, "distillation.teacher: is missing"),
        ({**SECTION, "loss": {"jsd_beta": 0.3}}, "`jsd_beta` has no effect with `divergence: forward_kl`"),
        ({**SECTION, "loss": {"divergence": "jsd", "jsd_beta": 1}}, "distillation.loss.jsd_beta"),
        ({**SECTION, "top_k": 0}, "distillation.top_k"),
        ({**SECTION, "training": {"eval_steps": 5}}, "`training.eval_steps` measures held-out rows"),
        (
            {"teacher": {"model": "big"}, "on_policy": {"prompts": "p.jsonl"}, "training": {"batch_size": 4}},
            "`training` has no effect without `data`: the rounds have `on_policy.training`",
        ),
        (
            {"teacher": {"model": "big"}, "on_policy": {"prompts": "p.jsonl", "training": {"eval_steps": 4}}},
            "`eval_steps` has no effect in `distillation.on_policy.training`",
        ),
    ],
)
def test_inconsistent_fields_are_refused_in_a_sentence(load: Any, section: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(load, {**RECIPE, "distillation": section})
