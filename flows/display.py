"""What a person sees of a run: a live line per stage that runs, and the tables at the end. Written to stderr."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from alignment_core.stages.base import StageResult
from alignment_core.stages.report import COLUMNS, cell, confidence
from alignment_core.tracking import Progress
from flows.costs import COSTS, cost_cells, run_cost, step_rows

HEADLINES = ("test_accuracy", "accuracy", "loss", "pairs", "train_rows", "completions", "parameters")
"""Metrics that stand for a stage in the table, the first that it has."""


class LiveDisplay:
    """Progress bars while a run goes on: a listener, to be used as a context manager."""

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

    def started(self, label: str) -> None:
        with self._lock:
            self._bars[label] = self.bars.add_task(label, total=None, count="", note="")

    def progress(self, label: str, progress: Progress) -> None:
        with self._lock:
            bar = self._bars.get(label)
        if bar is not None:
            of_total = f"/{progress.total:g}" if progress.total else ""
            count = f"{progress.done:g}{of_total} {progress.unit}"
            note = _note(progress.metrics)
            self.bars.update(bar, completed=progress.done, total=progress.total, count=count, note=note)

    def waits(self, label: str, reason: str | None) -> None:
        with self._lock:
            bar = self._bars.get(label)
        if bar is not None:
            self.bars.update(bar, note=f"waits for {reason}" if reason else "")

    def finished(self, result: StageResult) -> None:
        with self._lock:
            bar = self._bars.pop(result.label, None)
        if bar is not None:
            self.bars.remove_task(bar)
        mark = "[green]✓[/]" if result.state == "run" else "[blue]=[/]"
        seconds = f"{result.seconds:6.1f} s" if result.state == "run" else "  cached"
        self.console.print(f"{mark} {result.label:<28} {seconds}  {headline(result)}  [dim]{result.reason}[/]")
        for sentence in result.metrics.get("warnings", ()):
            self.warn(f"{result.label}: {sentence}")

    def ended(self, completed: bool) -> None: ...

    def warn(self, sentence: str) -> None:
        """Say something that the run goes on in spite of."""
        self.console.print("[yellow]warning:[/] ", end="")
        self.console.print(sentence, markup=False)


def _note(metrics: Mapping[str, Any]) -> str:
    shown = [
        (name, metrics[name]) for name in ("loss", "accuracy", "tokens_per_second") if metrics.get(name) is not None
    ]
    return "  ".join(f"{_name(name)} {_number(value)}" for name, value in shown)


def headline(result: StageResult) -> str:
    """A stage's key metric, such as ``test accuracy 0.93``."""
    if result.stage == "evaluate" and "accuracy" in result.metrics:
        return f"accuracy {_number(result.metrics['accuracy'])}"
    if result.stage == "overlap":
        return f"{result.metrics['overlap']} of {result.metrics['prompts']} prompts trained on"
    for name in HEADLINES:
        if name in result.metrics:
            return f"{_name(name)} {_number(result.metrics[name])}"
    return ""


def stage_table(stages: list[StageResult]) -> Table:
    """One row per stage: cached or run, what it cost, speed, key metric; then the total of those that ran."""
    table = Table(title="Stages", title_justify="left", box=None, padding=(0, 1, 0, 0), show_footer=True)
    cost = cost_cells(run_cost(stages))
    table.add_column("stage", "total", no_wrap=True)
    for name in COSTS:
        table.add_column(name, cost[name], justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("key metric")
    for stage in stages:
        ran, speed = stage.state == "run", stage.metrics.get("tokens_per_second")
        costs = cost_cells(stage.cost).values() if ran else (stage.state, "", "")
        table.add_row(stage.label, *costs, f"{speed:,.0f}" if speed and ran else "", headline(stage))
    return table


def step_table(stages: list[StageResult]) -> Table | None:
    """Seconds of a step by part, if a stage ran that measured them."""
    rows = step_rows(stages)
    if not rows:
        return None
    table = Table(title="Seconds of a step", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def result_table(policies: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per policy, the verifier beside the reward, so that over-optimising the reward would be seen."""
    title = f"Results on held-out prompts ({confidence(policies)} intervals over n prompts)"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    shown = [(name, title) for name, title in COLUMNS if any(name in metrics for metrics in policies.values())]
    for _, title in shown:
        table.add_column(title, justify="right")
    for label, metrics in policies.items():
        table.add_row(label, *(cell(dict(metrics), name) for name, _ in shown))
    return table


def _name(metric: str) -> str:
    return {"tokens_per_second": "tokens/s"}.get(metric, metric.replace("_", " "))


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3f}"
