"""The rows that a first recipe measures on: the user's, a test split, or some of the rows themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment_core.data import kinds
from alignment_core.data.conditions import compared
from alignment_core.data.fields import Fields
from alignment_core.data.folder import HELD_OUT
from alignment_core.data.hold_out import groups, prompts_of
from alignment_core.errors import UserError
from alignment_core.init import rows
from alignment_core.init.guess import ColumnMapping, check_columns
from alignment_core.init.images import copied, stand_in
from alignment_core.init.models import relative

LEAST_ROWS = 20
"""Data sets with fewer rows are trained on as a whole."""
MOST_HELD_OUT = 200
PROMPT_ROLES = {
    "preferences": ("prompt", "chosen", "rejected", "tools"),
    "unpaired": ("prompt", "tools"),
}
"""The roles that make prompts of a kind of rows; see :data:`OTHER_ROLES`."""
OTHER_ROLES = ("prompt", "messages", "label", "tools")
Source = dict[str, Any]


@dataclass(frozen=True)
class HeldOut:
    """Rows that are not trained on."""

    sources: list[Source] = field(default_factory=list)
    prompts: list[Source] = field(default_factory=list)
    """The same rows as prompts for policies; empty if a policy cannot or should not answer them."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The content of :func:`held_out_file`, if ``sources`` names it."""
    test_rows: int = 0
    """Instead of all these: number of rows that training itself holds out."""
    not_copied: bool = False
    """Whether training holds rows out because the images of rows are in several folders."""


def held_out_file(output: Path) -> Path:
    """The file beside a recipe for rows that are held out."""
    return output.with_name(output.stem + HELD_OUT)


def hold_out(eval_data: str | None, output: Path, data: rows.Rows, mapping: ColumnMapping, evaluates: bool) -> HeldOut:
    """Choose the rows to measure on; with ``evaluates`` policies answer prompts.

    Raises UserError if the rows of ``eval_data`` have other columns, or are trained on.
    """
    if eval_data is not None or data.test_sources:
        return _given(eval_data, output.absolute().parent, data, mapping, evaluates)
    if data.count < LEAST_ROWS:
        return HeldOut()
    if mapping.kind == "documents":
        return HeldOut(test_rows=min(MOST_HELD_OUT, data.count // 10))
    chosen = some_to_hold_out(data.first, mapping, min(MOST_HELD_OUT, max(4, data.count // 10)))
    if not chosen:
        return HeldOut()
    if mapping.images:
        chosen = copied(chosen, mapping.columns, data, output.absolute().parent) or []
    if not evaluates or not chosen or _is_verdict(mapping, chosen[0]):
        return HeldOut(test_rows=min(MOST_HELD_OUT, data.count // 10), not_copied=not chosen)
    sources = [{"path": held_out_file(output).name, **mapping.source_fields(chosen[0])}]
    return HeldOut(sources, _as_prompts(sources, mapping), chosen)


def _given(eval_data: str | None, folder: Path, data: rows.Rows, mapping: ColumnMapping, evaluates: bool) -> HeldOut:
    fields, sources, first = mapping.source_fields(data.first[0]), data.test_sources, data.first[0]
    if eval_data is not None:
        test = rows.find(eval_data)
        if same := [file for file in test.files if any(file.samefile(trained) for trained in data.files)]:
            raise UserError(f"--eval-data {eval_data}: {same[0]} is among the rows to train on")
        check_columns(test, fields.get("columns", {}))
        sources, first = test.sources, test.first[0]
    moved = [{**in_folder(source, folder), **fields} for source in sources]
    answered = evaluates and not _is_verdict(mapping, first)
    return HeldOut(moved, _as_prompts(moved, mapping) if answered else [])


def in_folder(source: Source, folder: Path) -> Source:
    """A source with its path relative to ``folder``."""
    path = str(source["path"])
    return {**source, "path": relative(path, folder)} if Path(path).expanduser().exists() else source


def some_to_hold_out(first: Sequence[dict[str, Any]], mapping: ColumnMapping, count: int) -> list[dict[str, Any]]:
    """The rows of about ``count`` prompts: whole groups of rows that share prompts, those with the smallest names.

    The choice depends on the prompts alone, so that more rows change few of them. A group with more than a fifth of the rows is
    never chosen, nor more than a fifth of the groups.
    """
    parse = kinds.load(mapping.kind).formats[mapping.format].parse
    parsed, prompts = [], []
    for row in first:
        try:
            fields = Fields(row, mapping.columns, stand_in if mapping.images else None)
            prompts.append(prompts_of(compared(parse(fields), mapping.template, fields), last_turn=False))
        except (ValueError, IndexError, TypeError, RecursionError):
            continue
        parsed.append(row)
    by_group: dict[str, list[dict[str, Any]]] = {}
    for name, row in zip(groups(prompts), parsed, strict=True):
        by_group.setdefault(name, []).append(row)
    small = sorted(name for name, group in by_group.items() if len(group) * 5 <= len(parsed))
    return [row for name in small[: min(count, len(by_group) // 5)] for row in by_group[name]]


def _is_verdict(mapping: ColumnMapping, first: Mapping[str, Any]) -> bool:
    """Whether prompts would take a verdict in the column `label`, such as a thumb, for the right answer."""
    if "label" not in first or (mapping.kind == "prompts" and "label" in mapping.columns):
        return False
    try:
        Fields(first, {}).label()
    except ValueError:
        return True
    return mapping.columns.get("label") == "label"


def _as_prompts(sources: list[Source], mapping: ColumnMapping) -> list[Source]:
    roles = PROMPT_ROLES.get(mapping.kind, OTHER_ROLES)
    columns = {role: column for role, column in mapping.columns.items() if role in roles}
    columns |= {"label": mapping.label} if mapping.label else {}
    renamed = {role: column for role, column in columns.items() if role != column}
    plain = [{name: value for name, value in source.items() if name != "columns"} for source in sources]
    return [{**source, **({"columns": renamed} if renamed else {})} for source in plain]
