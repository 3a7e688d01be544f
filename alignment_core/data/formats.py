"""The format of a data set, and the columns of its roles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format, Kind, roles
from alignment_core.errors import UserError

AUTO = "auto"
"""Stands for the first format that the first row fits, of those that have all roles in ``columns``."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise UserError if ``columns`` names a role that does not exist."""
    for role in columns:
        if role not in roles():
            near = difflib.get_close_matches(role, roles(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known roles: {', '.join(roles())}"
            raise UserError(f"columns: there is no role {role!r}; {hint}")


def check_format(format: str, kind: Kind) -> None:
    """Raise UserError if this format does not provide rows of this kind."""
    if format != AUTO and format not in kind.formats:
        raise UserError(f"format {format!r} does not provide {kind.gives}; choose one of {', '.join(kind.formats)}")


def detect(values: Mapping[str, Any], format: str, columns: Mapping[str, str], kind: Kind) -> str:
    """The format of a data set, decided by its first row; ``format`` is the recipe's.

    Raises UserError that lists the columns required and the columns found.
    """
    row = Fields(values, columns)
    available = f"the first row has {', '.join(map(str, values)) or 'no columns'}"
    for role, column in columns.items():
        if not row.holds(role):
            near = difflib.get_close_matches(column, list(map(str, values)), n=1, cutoff=0.6)
            raise UserError(
                f"columns: `{role}` is mapped to column {column!r}, but {available}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    candidates = _with_roles(columns, kind) if format == AUTO else {format: kind.formats[format]}
    for name, candidate in candidates.items():
        if all(map(row.holds, candidate.needs)) and (format != AUTO or candidate.fits(row)):
            return name
    wanted = list(dict.fromkeys(candidate.needs for candidate in candidates.values()))
    looked = ", or ".join(" and ".join(f"`{role}`" for role in needs) for needs in wanted)
    raise UserError(
        f"cannot read {kind.gives} from these columns: looked for {looked}; {available}. "
        f"Name the columns with `columns`, such as {{{wanted[0][0]}: {next(iter(values), 'column')}}}"
    )


def _with_roles(columns: Mapping[str, str], kind: Kind) -> dict[str, Format]:
    """The formats that have all roles of ``columns``. Raises UserError if there is none."""
    roles_of = {name: (*format.needs, *format.takes) for name, format in kind.formats.items()}
    candidates = {name: kind.formats[name] for name, readable in roles_of.items() if columns.keys() <= set(readable)}
    if not candidates:
        listed = "; ".join(f"{name}: {', '.join(readable)}" for name, readable in roles_of.items())
        raise UserError(
            f"columns: no format of {kind.gives} has {' and '.join(f'`{role}`' for role in columns)}; the formats have {listed}"
        )
    return candidates
