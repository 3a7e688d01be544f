"""Packages that count for a stage where its settings ask for them."""

from __future__ import annotations

from alignment_core.models.quantization import check_installed
from alignment_core.recipes import TrainingConfig


def packages_of(training: TrainingConfig) -> tuple[str, ...]:
    """What a training with these settings follows from beside them. Raises UserError for what is not installed."""
    if training.in_4bit:
        check_installed()
        return ("bitsandbytes", "peft")
    return ("peft",) if training.lora else ()
