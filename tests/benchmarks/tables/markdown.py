"""Cells and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.benchmarks.results import Line, Run

NONE = "—"


def lines(runs: Iterable[Run]) -> list[Line]:
    """The JSON objects of all runs."""
    return [line for run in runs for line in run.lines]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has as many cells as the head. Raises KeyError if there is no row."""
    content = [list(row) for row in rows]
    if not content:
        raise KeyError(f"no row of the table {' | '.join(head)}")
    assert all(len(row) == len(head) for row in content)
    rule = "|" + "---|" * len(head)
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *content))
    return "\n".join([first, rule, *others])


def number(value: float | None, decimals: int | None = None) -> str:
    """A number as it is, or with so many decimals; a dash for None."""
    if value is None:
        return NONE
    return f"{value:,g}" if decimals is None else f"{value:,.{decimals}f}"


def span(values: Iterable[float | None], decimals: int | None = None) -> str:
    """The lowest and highest number, or the only one; a dash if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return NONE
    low, high = (number(value, decimals) for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def millions(parameters: float) -> str:
    return f"{parameters / 1e6:.1f}M"
