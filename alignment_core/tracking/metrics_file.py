"""The reported metrics of all stages as JSON Lines in the run's folder: ``ALIGN_HOME/runs/<id>/metrics.jsonl``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from alignment_core.execution.curve import Curve, Line
from alignment_core.files import write_whole
from alignment_core.tracking.listener import Listener, Progress

METRICS = "metrics.jsonl"

Points = list[tuple[float, dict[str, float]]]
"""(step, metrics by name) of one stage, in the order of steps."""


class MetricsFile(Listener):
    """A listener that writes ``metrics.jsonl`` into ``folder``: ``at``, ``stage``, ``unit``, ``step`` and ``metrics``.

    The file has each step of a stage once: if a stage resumes from a checkpoint or starts again, later steps are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._curves = read_curves(folder)
        self._file = self._path.open("a")
        if self._file.tell():
            self._file.write("\n")  # ends a line that a killed process left incomplete

    def progress(self, label: str, progress: Progress) -> None:
        if not progress.metrics:
            return
        curve = self._curves[label]
        latest = Curve()
        latest.add(progress.done, progress.unit, {**progress.metrics})
        if curve.put(latest.lines[-1]):
            self._file.write(_text(label, curve.lines[-1]))
            self._file.flush()
        else:
            self._rewrite()

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        self._curves[label] = Curve(lines)
        self._rewrite()

    def ended(self, completed: bool) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        """Rewrite the file in the order of time."""
        lines = [(line["at"], label, line) for label, curve in self._curves.items() for line in curve.lines]
        text = "".join(_text(label, line) for _, label, line in sorted(lines, key=lambda item: item[0]))
        self._file.close()
        write_whole(self._path, lambda file: file.write(text.encode()))
        self._file = self._path.open("a")


def _text(label: str, line: Line) -> str:
    return json.dumps({"at": line["at"], "stage": label, **line}) + "\n"


def read_curves(folder: Path) -> defaultdict[str, Curve]:
    """The reported curves of the run in ``folder`` by stage; unreadable lines are left out."""
    curves: defaultdict[str, Curve] = defaultdict(Curve)
    path = folder / METRICS
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError, KeyError, TypeError):
            line = json.loads(text)
            curves[line.pop("stage")].put({"at": "", "unit": "", **line})
    return curves


def read_points(folder: Path) -> dict[str, Points]:
    """The reported steps and metrics of the run in ``folder`` by stage; empty if there is no file."""
    return {label: points_of(curve) for label, curve in read_curves(folder).items()}


def points_of(curve: Curve) -> Points:
    """Steps and their finite metrics."""
    return [(line["step"], _known(line["metrics"])) for line in curve.lines]


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
