"""Small recipes, and their check as in `align check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks.report import Findings, check
from alignment_core.checks.rows import Question, TokenizerSource
from alignment_core.data.pin import pin
from alignment_core.recipes import parse_recipe
from alignment_core.stages.dataset import DatasetConfig

MODEL = {"scratch": {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}}


def sft(rows: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "sft", "name": "demo", "model": MODEL, "sft": {"data": {"path": str(rows), **fields}}}


def rl(rows: Path, reward: dict[str, Any], **model: Any) -> dict[str, Any]:
    shape = {"scratch": {**MODEL["scratch"], **model}}
    section = {
        "prompts": {"path": str(rows), "columns": {"label": "completion"}},
        "generation": {"num_generations": 2, "max_completion_length": 16},
        "rewards": [reward],
    }
    return {"method": "rl", "name": "demo", "model": shape, "rl": section}


def look(store: Store, recipe: dict[str, Any]) -> Findings:
    parsed = parse_recipe(recipe)
    return check(plan(parsed, store), parsed.resources)


def questions(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """The questions to the row reader of a data set that is malformed without any tokenizer."""
    parsed: Any = parse_recipe(recipe)
    (source,) = parsed.sft.data.sources
    dataset = DatasetConfig(data=parsed.sft.data, sources=(pin(source),), kind="demonstrations")
    return [Question(label="sft/data", dataset=dataset, tokenizer=TokenizerSource()).model_dump(mode="json")]
