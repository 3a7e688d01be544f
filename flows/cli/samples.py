"""``align samples``: show prompts, completions and pairs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from alignment.flows.console import JsonOption, RunArgument, out, print_json
from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.errors import UserError
from alignment_core.printable import printable

MOST_CHARACTERS = 1500


def samples(
    run: RunArgument = journal.LAST,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Stage to show. Default: the policies' completions of held-out prompts, or else those sampled in training."
        ),
    ] = None,
    branch: Annotated[
        str,
        typer.Option(help="Branch of a comparison: show the policies that it compares itself, or one of its stages."),
    ] = "",
    count: Annotated[int, typer.Option("-n", min=1, help="Number of rows.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show prompts, completions and rewards of a stage, pairs side by side, or answers before and after training."""
    from alignment_core.lineage.samples import compared, stages_with_text, without_comparison
    from alignment_core.lineage.samples import samples as of_stage

    record = journal.find(run)
    store, lines = open_store(record.store, writes=False), journal.stages(record.run_id)
    if branch:
        of_branch = {
            label.removeprefix(f"{branch}/"): line for label, line in lines.items() if label.startswith(f"{branch}/")
        }
        if not of_branch:
            raise UserError(
                f"--branch {branch}: run {journal.short_id(record.run_id)} ({record.name}) has no such branch"
            )
        lines = of_branch
    rows = compared(store, lines, count)[1] if stage is None else of_stage(store, lines, stage, count)
    if not rows and stage is None:
        stage, rows = without_comparison(store, lines, count)
    if not rows:
        known = ", ".join(stages_with_text(store, lines)) or "none so far"
        raise UserError(
            f"run {journal.short_id(record.run_id)} ({record.name}) sampled no completions; --stage shows another text, of "
            f"{known}"
        )
    if as_json:
        return print_json({"run": record.run_id, "stage": stage, "rows": rows})
    for number, row in enumerate(rows, start=1):
        out.print(_block(number, row))
    return None


def _block(number: int, row: dict[str, Any]) -> Table:
    """A row as a table of names and wrapped texts."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), title=f"{number}", title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name, Text(as_text(value)))
    return table


def as_text(value: Any) -> str:
    """A value as text: short numbers, truncated texts, visible control characters."""
    from alignment_core.lineage.samples import text_of

    text = printable(text_of(value))
    cut = len(text) - MOST_CHARACTERS
    return text if cut <= 0 else f"{text[:MOST_CHARACTERS]}… ({cut} more characters)"
