"""Prompts of any rows that `align init` reads, for `align generate` and for evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alignment_core.data import kinds
from alignment_core.data.fields import Fields
from alignment_core.errors import DataError
from alignment_core.init import rows
from alignment_core.init.guess import ColumnMapping, columns_of, guess_columns, unreadable
from alignment_core.init.images import have_images
from alignment_core.init.names import CONTEXT, called


def prompts_of(name: str) -> tuple[dict[str, Any], list[str]]:
    """The data section for the prompts of a file, folder, glob or Hub data set, and sentences about how it is read.

    Raises UserError if there are no rows, or no prompts in them.
    """
    data = rows.find(name)
    mapping = guess_columns(data.first, "prompts", (), {}, have_images(data.first, {}))
    if mapping is None:
        error = str(unreadable(data, kinds.load("prompts")))
        raise DataError(error.replace("--column ROLE=NAME", "--set generate.prompts.columns.ROLE=NAME"))
    # a column is a right answer only if it is called `label`: answers are not compared here
    columns = {role: column for role, column in mapping.columns.items() if role != "label" or column == "label"}
    mapping, notes = with_further_column(replace(mapping, columns=columns), data.first)
    if renamed := [f"`{column}` is the {role}" for role, column in columns.items() if role != column]:
        notes.append(f"{name}: {', '.join(renamed)}{', followed by the further column' if mapping.further else ''}")
    section = _section([{**source, **mapping.source_fields(data.first[0])} for source in data.sources])
    return {**section, **({"prompt_template": mapping.template} if mapping.template else {})}, [*data.notes, *notes]


def unread_prompts(name: str) -> dict[str, Any]:
    """The data section without a guess of columns and format."""
    return _section(rows.find(name).sources)


def _section(sources: list[dict[str, Any]]) -> dict[str, Any]:
    return sources[0] if len(sources) == 1 else {"sources": sources}


def with_further_column(mapping: ColumnMapping, first: Sequence[Mapping[str, Any]]) -> tuple[ColumnMapping, list[str]]:
    """Add a further column to the prompt, such as Alpaca's `input`, if there is one; and sentences about parts of the rows that
    are not in the prompt."""
    prompt = mapping.columns.get("prompt")
    if prompt is None or mapping.kind == "documents":
        return mapping, []
    notes = []
    used = {column.partition(".")[0] for column in mapping.columns.values()}
    column, dot, turn = prompt.rpartition(".")
    if dot and turn == "0":  # turns.0, as in MT-Bench
        turns = [Fields(row, {"prompt": column}).value("prompt") for row in first]
        if count := sum(isinstance(value, list) and len(value) > 1 for value in turns):
            notes.append(f"{count} of {len(first)} rows have further turns in `{column}`: only the first is asked")
    for column in called(CONTEXT, columns_of(first)):
        values = [row.get(column) for row in first]
        if column in used or not column.isidentifier() or not any(values):
            continue
        if all(isinstance(value, str | None) for value in values):
            return replace(mapping, further=column), notes
    return mapping, notes
