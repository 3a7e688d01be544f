"""All that stages report, as one JSON object a line in the run's folder: ``ALIGN_HOME/runs/<id>/metrics.jsonl``."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alignment_core.tracking.listener import Listener, Progress

METRICS = "metrics.jsonl"

Points = list[tuple[float, dict[str, float]]]
"""(step, metrics by name) of one stage, in the order of steps."""


class MetricsFile(Listener):
    """A listener that writes ``metrics.jsonl`` into ``folder``: ``at``, ``stage``, ``unit``, ``step`` and ``metrics``."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS).open("a")
        if self._file.tell():
            self._file.write("\n")  # ends a line that a kill may have cut

    def progress(self, label: str, progress: Progress) -> None:
        if not progress.metrics:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "stage": label, "unit": progress.unit, "step": progress.done, "metrics": {**progress.metrics}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def ended(self, completed: bool) -> None:
        self._file.close()


def read_points(folder: Path) -> dict[str, Points]:
    """What the stages of the run in ``folder`` reported, by label; nothing where the file is not there.

    A stage that began again, or went on from its last checkpoint, said some steps twice: the later ones count.
    """
    found: defaultdict[str, Points] = defaultdict(list)
    path = folder / METRICS
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError, KeyError, TypeError):
            one: dict[str, Any] = json.loads(line)
            points, step = found[one["stage"]], one["step"]
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, {name: value for name, value in one["metrics"].items() if value is not None}))
    return dict(found)
