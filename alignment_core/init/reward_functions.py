"""The user's reward functions in a first recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment_core.init.guess import ColumnMapping, columns_of
from alignment_core.init.models import relative
from alignment_core.init.rows import without_recipe_hints
from alignment_core.recipes.sections.data import TAKEN
from alignment_core.user_code.functions import function_content

PROMPT_ROLES = ("prompt", "messages", "tools")
"""Roles whose columns reward functions get anyway."""


@without_recipe_hints()
def check(names: Sequence[str]) -> None:
    """Raise UserError for a name that is no function. The code is not executed."""
    for name in names:
        function_content(name, "--reward")


def written(name: str, folder: Path) -> str:
    """The name in a recipe in ``folder``."""
    file, colon, function = name.rpartition(":")
    return f"{relative(file, folder)}{colon}{function}" if file.endswith(".py") else name


def columns_for(rows: Sequence[dict[str, Any]], mapping: ColumnMapping) -> list[str]:
    """Columns to keep for the functions: all that every row has, without those that functions get anyway."""
    prompt_columns = {column.partition(".")[0] for role, column in mapping.columns.items() if role in PROMPT_ROLES}
    free = [column for column in columns_of(rows) if column not in TAKEN | prompt_columns]
    return [column for column in free if all(column in row for row in rows)]
