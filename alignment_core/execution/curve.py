"""The curve of a stage: the metrics that it reported, one line for each step.

Each checkpoint holds the curve up to its step, and the finished artifact has the whole curve as an attachment. So the curve is
complete after a resume, and where a result is reused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

CURVE = "curve.jsonl"
"""Name of the attachment of an artifact."""
Line = dict[str, Any]
"""``at`` (ISO 8601 in UTC), ``unit``, ``step`` and ``metrics``."""


class Curve:
    """Lines in the order of their steps, each step once."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.lines: list[Line] = []
        for line in lines:
            self.put(line)

    def add(self, step: float, unit: str, metrics: Mapping[str, float | None]) -> None:
        """Add metrics measured after ``step``; see :meth:`put`."""
        if metrics:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.put({"at": at, "unit": unit, "step": step, "metrics": finite(metrics)})

    def put(self, line: Line) -> bool:
        """Add a line; True if it only had to be appended.

        Later steps are dropped, because the stage has gone back to a checkpoint. Metrics of an existing step are merged.
        """
        dropped = False
        while self.lines and self.lines[-1]["step"] > line["step"]:
            self.lines.pop()
            dropped = True
        if self.lines and self.lines[-1]["step"] == line["step"]:
            before = self.lines.pop()
            line = {**line, "metrics": {**before["metrics"], **line["metrics"]}}
            dropped = True
        self.lines.append(line)
        return not dropped

    def up_to(self, step: float) -> Curve:
        """A copy without later steps."""
        return Curve(line for line in self.lines if line["step"] <= step)

    def metrics_after(self, step: float) -> dict[str, float]:
        """Metrics of ``step`` if it is the last one; otherwise empty."""
        line = self.lines[-1] if self.lines and self.lines[-1]["step"] == step else {"metrics": {}}
        return {name: value for name, value in line["metrics"].items() if value is not None}

    def to_bytes(self) -> bytes:
        """One JSON object a line."""
        return "".join(f"{json.dumps(line)}\n" for line in self.lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Curve:
        """A curve from its lines; unreadable ones are skipped."""
        curve = cls()
        for text in data.decode(errors="replace").splitlines():
            with suppress(json.JSONDecodeError, KeyError, TypeError):
                curve.put(json.loads(text))
        return curve


NOT_FINITE = (None, "NaN", "Infinity", "-Infinity")
"""NaN and infinities as results of stages and records of the store have them, because JSON has no such numbers."""


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Metrics as JSON can hold them: None for values that are not finite."""
    return {name: None if value is None or not abs(value) < 1e300 else value for name, value in metrics.items()}
