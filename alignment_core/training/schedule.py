"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from alignment_core.recipes import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0) of ``total_steps``: linear warm-up, then decay to the floor."""
    warmup = round(config.warmup_ratio * total_steps)
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    if config.lr_scheduler_type == "constant":
        return peak
    share = 1 - done if config.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * share
