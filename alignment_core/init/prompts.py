"""Prompts for `align generate`: any rows of which `align init` can make prompts, read in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alignment_core.data import kinds
from alignment_core.data.fields import Fields
from alignment_core.errors import DataError
from alignment_core.init import rows
from alignment_core.init.guess import ColumnMapping, columns_of, nothing_fits, reading
from alignment_core.init.names import CONTEXT, called

ASKED = ("prompt", "messages", "tools")
"""Roles that a prompt consists of; a right answer is one only if its column is called so."""


def prompts_of(named: str) -> tuple[dict[str, Any], list[str]]:
    """A data set of prompts as a recipe has it, of a file, folder, glob or Hub name; and sentences about how it is read.

    Raises UserError where there are no rows, or none that hold prompts.
    """
    found = rows.find(named, keep_apart=False)
    chosen = reading(found.first, "prompts", (), {})
    if chosen is None:
        error = str(nothing_fits(found.named, found.first, kinds.load("prompts"), found.bad))
        raise DataError(error.replace("--column ROLE=NAME", "--set generate.prompts.columns.ROLE=NAME"))
    kept = {role: column for role, column in chosen.columns.items() if role != "label" or column == "label"}
    chosen = replace(chosen, columns=kept)
    notes = [*found.notes, *further_turns(chosen, found.first)]
    sources = [{**one, **chosen.source_fields(found.first[0])} for one in found.sources]
    template = template_of(chosen, found, notes)
    if columns := {role: column for role, column in kept.items() if role in ASKED and role != column}:
        named_so = ", ".join(f"`{column}` is the {role}" for role, column in columns.items())
        notes.append(f"{named}: {named_so}{', followed by the further column' if template else ''}")
    return {**_data_of(sources), **({"prompt_template": template} if template else {})}, notes


def unread_prompts(named: str) -> dict[str, Any]:
    """The same data set without any guess of how its rows are read."""
    return _data_of(rows.find(named, keep_apart=False).sources)


def _data_of(sources: list[dict[str, Any]]) -> dict[str, Any]:
    return sources[0] if len(sources) == 1 else {"sources": sources}


def further_turns(chosen: ColumnMapping, first: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence where rows list several turns of a user, as MT-Bench's do: the first one is the prompt."""
    column, dot, place = chosen.columns.get("prompt", "").rpartition(".")
    if not dot or place != "0":
        return []
    turns = [Fields(row, {"prompt": column}).value("prompt") for row in first]
    count = sum(isinstance(one, list) and len(one) > 1 for one in turns)
    return [f"{count} of {len(first)} rows have further turns in `{column}`: only the first is asked"] if count else []


def template_of(chosen: ColumnMapping, found: rows.Rows, warnings: list[str]) -> str | None:
    """How the prompt is written where a further column belongs into it, as Alpaca's `input` beside `instruction`."""
    prompt = chosen.columns.get("prompt")
    if prompt is None or chosen.kind == "documents":
        return None
    used = {column.partition(".")[0] for column in chosen.columns.values()}
    for column in called(CONTEXT, columns_of(found.first)):
        values = [row.get(column) for row in found.first]
        if column in used or not column.isidentifier() or not any(values):
            continue
        if all(isinstance(one, str) for one in values):
            return f"{{prompt}}\n\n{{{column}}}"
        if all(isinstance(one, str | None) for one in values):
            warnings.append(f'`{column}` is not put into the prompt, as it is null in some rows: write "" there')
    return None
