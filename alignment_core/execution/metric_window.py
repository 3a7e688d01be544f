"""Means of a stage's metrics over the first and the last tenth of its steps."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from alignment_core.files import write_whole
from alignment_core.models.masters import masters_of
from alignment_core.models.saving import changed_weights, checkpoint_dtype

FIRST = "first.json"
"""File in the progress folder: an attempt that resumes after a crash has not seen the first steps."""
LAST = "last.json"
"""File in the progress folder, written before each checkpoint: the last steps, of which an attempt that resumes sees a part."""
LEAST_CHANGED = 0.01
"""Share of changed weights below which training in half precision is warned about."""


class MetricWindow:
    """Means over the first and the last tenth of ``total`` steps, at least one step each, in an attempt that starts after
    ``done`` steps."""

    def __init__(self, progress: Path, done: int, total: int) -> None:
        self._file = progress / FIRST
        self._whole = done == 0
        self._edge = max(1, total // 10)
        self._total = total
        self._head: list[tuple[float, Mapping[str, float]]] = []
        self._tail: deque[tuple[int, float, Mapping[str, float]]] = deque(maxlen=self._edge)
        self._saved = progress / LAST
        if done and self._saved.is_file():
            earlier = json.loads(self._saved.read_text())
            self._tail.extend((step, weight, metrics) for step, weight, metrics in earlier if step <= done)

    def add(self, step: int, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Add the metrics of step number ``step``, counted from 1."""
        if step <= self._edge:
            self._head.append((weight, metrics))
        if step == self._edge and self._whole:
            write_whole(self._file, lambda file: file.write(json.dumps(_means(self._head)).encode()))
        self._tail.append((step, weight, metrics))

    def save(self) -> None:
        """Save the last steps for an attempt that resumes from the checkpoint which is written next."""
        write_whole(self._saved, lambda file: file.write(json.dumps(list(self._tail)).encode()))

    def metrics(self) -> dict[str, float]:
        """``<name>`` over the last tenth of the steps, and ``<name>.first`` over the first tenth, if that is known and
        differs."""
        last = _means([(weight, metrics) for _, weight, metrics in self._tail])
        if self._edge == self._total or not self._file.is_file():
            return last
        first = json.loads(self._file.read_text())
        return last | {f"{name}.first": first[name] for name in last if name in first}


def movement(start: Path, result: Path, name: str = "") -> tuple[dict[str, float], list[str]]:
    """The metric ``changed_weights`` of a policy in the folder ``result``, trained from that in ``start``, and warnings: if no
    weight changed, or so few that rounding hides the training. ``name`` is that of another output than the stage's first."""
    share = changed_weights(start, result)
    if share is None:
        return {}, []
    warnings = []
    keeps_masters = masters_of(result) is not None
    if share == 0 and keeps_masters:
        warnings.append(
            f"no weight differs from the initial ones in {checkpoint_dtype(result)}: only the fp32 master weights, from which "
            "the next training continues, may have changed"
        )
    elif share == 0:
        warnings.append("the policy is identical to the initial one: no step changed any weight")
    elif share < LEAST_CHANGED and not keeps_masters and (dtype := checkpoint_dtype(result)) != "float32":
        warnings.append(
            f"{share:.2%} of the weights differ from the initial ones: changes below the precision of {dtype} "
            "are lost when another stage continues from this policy: take more steps, raise the learning rate, or train in fp32"
        )
    return (
        {f"changed_weights/{name}" if name else "changed_weights": share},
        [f"{name}: {warning}" if name else warning for warning in warnings],
    )


def _means(parts: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Weighted means; each metric over the parts that have it."""
    means = {}
    for name in dict.fromkeys(name for _, metrics in parts for name in metrics):
        weights = [(weight, metrics[name]) for weight, metrics in parts if name in metrics]
        means[name] = sum(weight * value for weight, value in weights) / max(sum(weight for weight, _ in weights), 1e-9)
    return means
