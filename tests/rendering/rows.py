"""Rows of the kinds of data, as a data set without limits would hold them."""

from __future__ import annotations

from typing import Any

from alignment_core.data.kinds import Example
from alignment_core.data.limits import Limits
from alignment_core.data.template import Renderer
from alignment_core.recipes.sections.data import DataConfig
from tests.rendering.families import Family

CONFIG = DataConfig.model_validate({"sources": ["rows.jsonl"], "max_length": 8192})


def rows_of(
    example: Example, renderer: Renderer, family: Family, max_length: int | None = None, **settings: Any
) -> list[dict[str, Any]]:
    config = CONFIG if max_length is None else CONFIG.model_copy(update={"max_length": max_length})
    rows = example.rows(Limits(config, renderer, family.tokenizer.bos_token_id, settings))
    assert not any(isinstance(row, str) for row in rows), rows
    return list(rows)  # type: ignore[arg-type]


def readable(family: Family, ids: list[int]) -> list[str]:
    """Tokens instead of ids, so that a failed test shows readable differences."""
    return list(family.tokenizer.convert_ids_to_tokens(ids))
