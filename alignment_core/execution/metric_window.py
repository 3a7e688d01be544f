"""Means of a stage's metrics over the first and the last tenth of its steps."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from alignment_core.files import write_whole
from alignment_core.models.saving import same_weights

FIRST = "first.json"
"""File in the progress folder: an attempt that resumes after a crash has not seen the first steps."""


class MetricWindow:
    """Means over the first and the last tenth of ``total`` steps, at least one step each, in an attempt that starts after
    ``done`` steps."""

    def __init__(self, progress: Path, done: int, total: int) -> None:
        self._file = progress / FIRST
        self._whole = done == 0
        self._edge = max(1, total // 10)
        self._total = total
        self._head: list[tuple[float, Mapping[str, float]]] = []
        self._tail: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=self._edge)

    def add(self, step: int, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Add the metrics of step number ``step``, counted from 1."""
        if step <= self._edge:
            self._head.append((weight, metrics))
        if step == self._edge and self._whole:
            write_whole(self._file, lambda file: file.write(json.dumps(_means(self._head)).encode()))
        self._tail.append((weight, metrics))

    def metrics(self) -> dict[str, float]:
        """``<name>`` over the last tenth of the steps, and ``<name>.first`` over the first tenth, if that is known and
        differs."""
        last = _means(self._tail)
        if self._edge == self._total or not self._file.is_file():
            return last
        first = json.loads(self._file.read_text())
        return last | {f"{name}.first": first[name] for name in last if name in first}


def unmoved(start: Path, result: Path) -> list[str]:
    """A warning if a stage's result has the weights of its input."""
    if not same_weights(start, result):
        return []
    return ["the policy is identical to the initial one: no step changed any weight"]


def _means(parts: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted means; each metric over the parts that have it."""
    means = {}
    for name in dict.fromkeys(name for _, metrics in parts for name in metrics):
        weights = [(weight, metrics[name]) for weight, metrics in parts if name in metrics]
        means[name] = sum(weight * value for weight, value in weights) / max(sum(weight for weight, _ in weights), 1e-9)
    return means
