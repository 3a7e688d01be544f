"""What rows are: the kind and format that read them, and which of their columns play which role."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.data import formats, kinds
from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format, Kind
from alignment_core.errors import DataError, UserError
from alignment_core.init.names import called, names

PARSED = 50
"""Rows that are read to see whether a guess holds."""
ENOUGH = 0.8
"""Share of them that it has to read; the checks name the others."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ColumnMapping:
    """A way to read rows."""

    kind: str
    format: str
    columns: dict[str, str]
    """The column of each role that the rows have."""
    others: dict[str, list[str]] = field(default_factory=dict)
    """Columns that could as well play a role."""

    def source_fields(self, first: Row) -> dict[str, Any]:
        """What a source of a recipe has to say for this reading: nothing that would be found out anyway."""
        columns = {role: column for role, column in self.columns.items() if role != column}
        found = formats.detect(first, formats.AUTO, columns, kinds.load(self.kind))
        return {
            **({"format": self.format} if found != self.format else {}),
            **({"columns": columns} if columns else {}),
        }


def reading(rows: Sequence[Row], kind_name: str, only: Sequence[str], given: Mapping[str, str]) -> ColumnMapping | None:
    """How a kind of rows reads these, in one of ``only`` these formats (none: in any); None if it cannot.

    ``given`` are columns by role that the user named.
    """
    kind = kinds.load(kind_name)
    for name, format in kind.formats.items():
        if only and name not in only:
            continue
        best = next(_that_read(rows, name, format, given), None)
        if best is not None:
            return ColumnMapping(kind_name, name, best, _as_likely(rows, name, format, best, given))
    return None


def _that_read(rows: Sequence[Row], name: str, format: Format, given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Columns by role with which a format reads the rows, the likeliest first."""
    needed = [_choices(rows, name, role, given) for role in format.needs]
    if not all(needed):
        return
    more: list[list[str | None]] = [[*_choices(rows, name, role, given), None] for role in format.takes]
    for chosen in itertools.product(*needed, *more):
        named = zip((*format.needs, *format.takes), chosen, strict=True)
        by_role = {role: column for role, column in named if column is not None}
        if len(set(by_role.values())) == len(by_role) and reads(rows, format, by_role):
            yield by_role


def _choices(rows: Sequence[Row], name: str, role: str, given: Mapping[str, str]) -> list[str]:
    """The columns that may play a role: the one that the user named, the one that is called so, or all that may be."""
    if role in given:
        return [given[role]]
    columns = [column for column in columns_of(rows) if column not in given.values()]
    return [role] if role in columns else called(names(name, role), columns)


def _as_likely(
    rows: Sequence[Row], name: str, format: Format, best: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, list[str]]:
    """Other columns that could play a role as well as the best ones."""
    found = {}
    for role in format.needs:
        free = [one for one in _choices(rows, name, role, given) if one not in best.values()]
        if others := [one for one in free if reads(rows, format, {**best, role: one})]:
            found[role] = others
    return found


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns that any of the first rows has."""
    return list(dict.fromkeys(str(column) for row in rows[:PARSED] for column in row))


def reads(rows: Sequence[Row], format: Format, columns: Mapping[str, str]) -> bool:
    """Whether a format reads the first row, and most of the others, with these columns."""
    first, some = Fields(rows[0], columns), rows[:PARSED]
    try:
        if not (all(map(first.holds, format.needs)) and format.fits(first)):
            return False
    except (TypeError, AttributeError):
        return False
    return sum(_parses(row, format, columns) for row in some) >= ENOUGH * len(some)


def _parses(row: Row, format: Format, columns: Mapping[str, str]) -> bool:
    try:
        format.parse(Fields(row, columns))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False
    return True


def check_given(named: str, rows: Sequence[Row], given: Mapping[str, str]) -> None:
    """Raise UserError for a role or column that rows of this name do not have."""
    formats.check_columns(given)
    row = Fields(rows[0], given)
    for role, column in given.items():
        if not row.holds(role):
            raise UserError(
                f"--column {role}={column}: the first row of {named} has {', '.join(map(str, rows[0])) or 'no columns'}"
            )


def _mistake(rows: Sequence[Row], kind: Kind, asked: bool) -> str | None:
    """What is wrong with rows for a kind that is asked for, or whose columns are there by their own names."""
    first = Fields(rows[0], {})
    if not asked and not any(all(map(first.holds, format.needs)) for format in kind.formats.values()):
        return None
    for number, row in enumerate(rows[:PARSED], 1):
        try:
            name = formats.detect(rows[0], formats.AUTO, {}, kind)
            kind.formats[name].parse(Fields(row, {}))
        except (UserError, ValueError, TypeError, RecursionError) as error:
            said = str(error).partition(". Name the columns")[0]
            return f"row {number}: {said}" + ("; name the columns with --column ROLE=NAME" if asked else "")
    return None


def nothing_fits(named: str, rows: Sequence[Row], kind: Kind | None, bad: Sequence[str]) -> DataError:
    """What to say of rows that nothing reads."""
    columns = columns_of(rows)
    only = columns[0] if len(columns) == 1 else ""
    for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if separator in only:
            return DataError(f"{named}: its columns are separated by {word} ({only!r}); save it with commas")
    for one in [kind] if kind is not None else kinds.KINDS.loaded()[0].values():
        if said := _mistake(rows, one, asked=kind is not None):
            return DataError(f"{named}: {said}")
    return DataError(
        f"{named}: nobody can tell what its rows are: the first has {', '.join(map(str, rows[0])) or 'no columns'}; name them "
        "with --column ROLE=NAME, such as --column prompt=NAME --column completion=NAME (`align fields sft.data` has more)"
        + (f"; {bad[0]}" if bad else "")
    )
