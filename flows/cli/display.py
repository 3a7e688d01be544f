"""The display of a run in a terminal: a live line on stderr per running stage, and the tables at the end."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from alignment.flows.cli.stream import EventStream
from alignment.flows.console import err, print_json, print_line
from alignment.flows.costs import COSTS, cost_cells, run_cost, step_rows
from alignment_core.execution.base import StageResult, load_stage
from alignment_core.host.progress_log import headline
from alignment_core.journal import short_id
from alignment_core.reporting.results import HEAD, result_rows
from alignment_core.stages.report import cell, columns_of, confidence
from alignment_core.stages.variants import table as variants_table
from alignment_core.tracking import Listener, Progress


def display_of(as_json: bool) -> LiveDisplay | EventStream:
    """JSON objects on stdout with ``as_json``; else progress bars on a terminal, and lines on stdout elsewhere."""
    if as_json:
        return EventStream(print_json)
    if err.is_terminal:
        return LiveDisplay(err)
    return EventStream(lambda event: print_line(event["text"]))


class LiveDisplay(Listener):
    """A listener with progress bars, to be used as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description:<28}"),
            BarColumn(24),
            TextColumn("{task.fields[count]:<16}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
        )
        self._lock = threading.Lock()
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> LiveDisplay:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def opened(self, run_id: str, name: str, folder: str, log: str) -> None:
        """The run has an id, a folder for its journal and metrics, and a log."""
        self.console.print(f"[dim]run {short_id(run_id)}: metrics in {folder}, log {log}[/]")

    def started(self, label: str) -> None:
        with self._lock:
            self._bars[label] = self.bars.add_task(label, total=None, count="", note="")

    def progress(self, label: str, progress: Progress) -> None:
        of_total = f"/{progress.total:,.0f}" if progress.total else ""
        count = f"{progress.done:,.0f}{of_total} {progress.unit}"
        note = headline(progress.shows, progress.metrics)
        if (speed := progress.metrics.get("tokens_per_second")) is not None:
            note += f"  {speed:,.0f} tokens/s"
        self._update(label, completed=progress.done, total=progress.total, count=count, note=note)

    def waits(self, label: str, reason: str | None) -> None:
        self._update(label, note=f"waits for {reason}" if reason else "")

    def starts(self, label: str, what: str | None) -> None:
        self._update(label, note=f"starts {what}" if what else "")

    def _update(self, label: str, **changes: Any) -> None:
        with self._lock:
            bar = self._bars.get(label)
        if bar is not None:
            self.bars.update(bar, **changes)

    def warned(self, label: str, sentence: str) -> None:
        self.warn(f"{label}: {sentence}")

    def failed(self, label: str, sentence: str) -> None:
        self._remove_bar(label)
        self.warned(label, sentence)

    def _remove_bar(self, label: str) -> None:
        with self._lock:
            bar = self._bars.pop(label, None)
        if bar is not None:
            self.bars.remove_task(bar)

    def finished(self, result: StageResult) -> None:
        self._remove_bar(result.label)
        mark = "[green]✓[/]" if result.state == "run" else "[blue]=[/]"
        seconds = result.times if result.state == "run" else "cached"
        self.console.print(
            f"{mark} {result.label:<28} {seconds}  {escape(key_metrics(result))}  [dim]{escape(result.reason)}[/]"
        )
        for sentence in result.warnings:
            self.warn(f"{result.label}: {sentence}")

    def left(self, report: str) -> None:
        """The run ends before it is complete; ``report`` is the path of its report."""
        self.console.print("report so far: ", end="")
        self.console.print(report, markup=False)

    def warn(self, sentence: str) -> None:
        """Print a warning."""
        self.console.print("[yellow]warning:[/] ", end="")
        self.console.print(sentence, markup=False)


def key_metrics(result: StageResult) -> str:
    """The key metrics of the stage's module, such as ``reward 0.120 → 0.830 · length 14.000``."""
    return headline(load_stage(result.stage).shows, result.metrics)


def stage_table(stages: list[StageResult]) -> Table:
    """One row per stage: state or cost, speed, key metrics; and the total cost."""
    table = Table(title="Stages", title_justify="left", box=None, padding=(0, 1, 0, 0), show_footer=True)
    cost = cost_cells(run_cost(stages))
    table.add_column("stage", "total", no_wrap=True)
    for name in COSTS:
        table.add_column(name, cost[name], justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("key metrics")
    for stage in stages:
        ran = stage.state == "run"
        speed = stage.metrics.get("tokens_per_second")
        costs = cost_cells(stage.cost).values() if ran else (stage.state, *[""] * (len(COSTS) - 1))
        table.add_row(stage.label, *costs, f"{speed:,.0f}" if speed and ran else "", escape(_shown(stage)))
    return table


def _shown(stage: StageResult) -> str:
    """The key metrics, and the packages whose versions differ from those of the cached result."""
    return " · ".join(filter(None, (key_metrics(stage), stage.made_with)))


def step_table(stages: list[StageResult]) -> Table | None:
    """Seconds of a step by part; None if no stage measured them."""
    rows = step_rows(stages)
    if not rows:
        return None
    table = Table(title="Seconds of a step", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def metric_table(metrics: Mapping[str, Any]) -> Table | None:
    """The metrics of a run by group, with labels and units; None if there are none."""
    groups = result_rows(metrics)
    if not groups:
        return None
    table = Table(title="Metrics", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", style="dim", no_wrap=True)
    for name in HEAD:
        table.add_column(name, justify="left" if name == HEAD[0] else "right", no_wrap=True)
    for group, rows in groups.items():
        for number, cells in enumerate(rows):
            table.add_row(group if number == 0 else "", *map(escape, cells))
    return table


def variant_table(metric: str, variants: list[dict[str, Any]]) -> Table:
    """One row per variant of a sweep, the best first."""
    head, rows = variants_table(metric, variants)
    table = Table(title=f"Variants, best {metric} first", title_justify="left")
    for name in head:
        table.add_column(escape(name), justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def result_table(policies: Mapping[str, Mapping[str, float]], branch: str = "") -> Table:
    """One row per policy, of the run or of a branch with an evaluation of its own. The verifier stands beside the reward, to
    show over-optimisation of the reward."""
    where = f" of {branch}" if branch else ""
    title = f"Results on held-out prompts{where} ({confidence(policies)} intervals over n prompts)"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    shown = columns_of(policies)
    for _, title in shown:
        table.add_column(title, justify="right")
    for label, metrics in policies.items():
        table.add_row(label, *(cell(dict(metrics), name) for name, _ in shown))
    return table
