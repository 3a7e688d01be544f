"""Recipes and results for the tests of trackers: nothing here runs a stage."""

from __future__ import annotations

from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageResult
from alignment_core.recipes import BaseRecipe, parse_recipe


def recipe_with(tracking: dict[str, Any], **changes: Any) -> BaseRecipe:
    content = {"method": "sft", "name": "small", "model": "some/model", "sft": {"data": {"task": "reverse"}}}
    return parse_recipe({**content, "tracking": tracking, **changes})


def result(label: str, **metrics: Any) -> StageResult:
    reference = Reference.parse("model@sha256:" + "0" * 64)
    return StageResult(
        label=label,
        stage="sft",
        key="1" * 64,
        state="run",
        reason="",
        seconds=1.0,
        outputs={"model": reference},
        metrics=metrics,
    )
