"""Guess the kind and format of rows, and which column plays which role."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data import formats, kinds
from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format, Kind
from alignment_core.errors import DataError, UserError
from alignment_core.init.images import stand_in
from alignment_core.init.names import called, names
from alignment_core.init.rows import Rows

PARSED_ROWS = 50
"""Rows on which a guess is tried."""
READABLE_SHARE = 0.8
"""Share of these rows that a format must read; `align check` names the others."""
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ColumnMapping:
    """A way to read rows."""

    kind: str
    format: str
    columns: dict[str, str]
    """Columns by role."""
    label: str | None = None
    """Column of demonstrations with the right answers, which a verifier can compare with."""
    further: str | None = None
    """Column that is added to the prompt, such as Alpaca's `input`."""
    kept: Sequence[str] = ()
    """Columns that are kept for reward functions."""
    images: bool = False
    """Whether images of the rows are read."""

    @property
    def template(self) -> str | None:
        """The `prompt_template` that adds the further column."""
        return f"{{prompt}}\n\n{{{self.further}}}" if self.further else None

    def source_fields(self, first: Row) -> dict[str, Any]:
        """`format`, `columns` and `keep_columns` of a recipe's source, where they differ from what is detected."""
        columns = {role: column for role, column in self.columns.items() if role != column}
        detected = formats.detect(first, formats.AUTO, columns, kinds.load(self.kind))
        fields = {
            "format": self.format if self.format != detected else "",
            "columns": columns,
            "keep_columns": self.kept,
        }
        return {name: value for name, value in fields.items() if value}


def guess_columns(
    rows: Sequence[Row], kind_name: str, only_formats: Sequence[str], given: Mapping[str, str], images: bool = False
) -> ColumnMapping | None:
    """How a kind of rows reads these, or None; with ``images`` if it can have some.

    An empty ``only_formats`` allows all formats; ``given`` are the columns by role that the user named.
    """
    kind = kinds.load(kind_name)
    for name, format in kind.formats.items():
        if only_formats and name not in only_formats:
            continue
        candidates = {role: _candidates(rows, name, role, given) for role in (*format.needs, *format.takes)}
        reads_images = images and kind.takes_images
        best = next(_readable(rows, format, candidates, reads_images), None)
        if best is not None:
            return ColumnMapping(kind_name, name, best, images=reads_images)
    return None


def _candidates(rows: Sequence[Row], format: str, role: str, given: Mapping[str, str]) -> list[str]:
    """Columns that may play a role: the user's, or the one with the role's name, or all with another name for it."""
    if role in given:
        return [given[role]]
    columns = [column for column in columns_of(rows) if column not in given.values()]
    return [role] if role in columns else called(names(format, role), columns)


def _readable(
    rows: Sequence[Row], format: Format, candidates: Mapping[str, list[str]], images: bool
) -> Iterator[dict[str, str]]:
    """Columns by role with which the format reads the rows, the likeliest first."""
    optional: list[list[str | None]] = [[*candidates[role], None] for role in format.takes]
    for chosen in itertools.product(*(candidates[role] for role in format.needs), *optional):
        columns = {role: column for role, column in zip(candidates, chosen, strict=True) if column is not None}
        if len(set(columns.values())) == len(columns) and reads(rows, format, columns, images):
            yield columns


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of the first rows."""
    return list(dict.fromkeys(str(column) for row in rows[:PARSED_ROWS] for column in row))


def reads(rows: Sequence[Row], format: Format, columns: Mapping[str, str], images: bool = False) -> bool:
    """Whether a format fits the first row and parses most of the others, with their ``images`` if wanted."""
    first = Fields(rows[0], columns)
    try:
        if not (all(map(first.holds, format.needs)) and format.fits(first)):
            return False
    except (TypeError, AttributeError):
        return False
    parsed = [_parses(row, format, columns, images) for row in rows[:PARSED_ROWS]]
    return sum(parsed) >= READABLE_SHARE * len(parsed)


def _parses(row: Row, format: Format, columns: Mapping[str, str], images: bool) -> bool:
    try:
        format.parse(Fields(row, columns, stand_in if images else None))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False
    return True


def check_columns(data: Rows, given: Mapping[str, str]) -> None:
    """Raise UserError for a role that does not exist, or a column that the data set does not have."""
    formats.check_columns(given)
    row = Fields(data.first[0], given)
    for role, column in given.items():
        if not row.holds(role):
            raise UserError(f"--column {role}={column}: the first row of {data.name} has {_listed(data.first[0])}")


def unreadable(data: Rows, kind: Kind | None = None) -> DataError:
    """The error for rows that cannot be read, or not as the wanted kind."""
    rows, columns = data.first, columns_of(data.first)
    separator = next((mark for mark in SEPARATORS if len(columns) == 1 and mark in columns[0]), None)
    if separator:
        return DataError(
            f"{data.name}: its columns are separated by {SEPARATORS[separator]} ({columns[0]!r}); save it with commas"
        )
    first = Fields(rows[0], {})
    for tried in [kind] if kind else kinds.KINDS.loaded()[0].values():
        by_name = any(all(map(first.holds, format.needs)) for format in tried.formats.values())
        if (kind or by_name) and (mistake := _mistake(rows, tried)):
            return DataError(f"{data.name}: {mistake}" + ("; name the columns with --column ROLE=NAME" if kind else ""))
    return DataError(
        f"{data.name}: the kind of its rows is unknown: the first has {_listed(rows[0])}; name the columns with --column "
        "ROLE=NAME, such as --column prompt=NAME --column completion=NAME (`align fields sft.data` has more)"
        + (f"; {data.problems[0]}" if data.problems else "")
    )


def _mistake(rows: Sequence[Row], kind: Kind) -> str | None:
    """Why the first rows are not of this kind, under the standard names of its columns."""
    for number, row in enumerate(rows[:PARSED_ROWS], 1):
        try:
            format = formats.detect(rows[0], formats.AUTO, {}, kind)
            kind.formats[format].parse(Fields(row, {}))
        except (UserError, ValueError, TypeError, RecursionError) as error:
            return f"row {number}: {str(error).partition('. Name the columns')[0]}"
    return None


def _listed(row: Row) -> str:
    return ", ".join(map(str, row)) or "no columns"
