"""Reports of ranks about their steps: sums, so that the driver can add ranks and divide once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class StepReport:
    """Sums over the steps of one call on one rank; the driver adds ranks and divides."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    normaliser: float = 0.0
    tokens: int = 0
    computed: int = 0
    """Tokens that were computed: those that sequences share once, and the padding of lines."""
    steps: int = 0
    grad_norm: float = math.nan
    learning_rate: float = 0.0
    seconds: float = 0.0
    each: list[StepReport] = field(default_factory=list)
    """The steps one by one, as far as they were added by :meth:`add`."""

    def add(self, step: StepReport) -> None:
        """Add the report of one step."""
        for name, value in step.sums.items():
            self.sums[name] += value
        self.normaliser += step.normaliser
        self.tokens += step.tokens
        self.computed += step.computed
        self.steps += step.steps
        self.grad_norm = step.grad_norm
        self.learning_rate = step.learning_rate
        self.each.append(step)


class MetricSums:
    """Sums of metrics over micro-batches. They stay on the device until they are read, because each read waits for the GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of a micro-batch, each a single number."""
        for name, value in metrics.items():
            value = value.detach().double()  # in fp32, a sum over many micro-batches loses digits
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self) -> dict[str, float]:
        """The sums by name."""
        return dict(zip(self._sums, torch.stack([*self._sums.values()]).tolist(), strict=True)) if self._sums else {}
