"""Packages that count for the keys of stages that train, and the configuration of such a stage."""

from __future__ import annotations

from alignment_core.execution.base import StageConfig
from alignment_core.models.quantization import check_installed, field_of
from alignment_core.recipes import TrainingConfig

TRAINING_PACKAGES = ("deepspeed", "jinja2", "torch", "transformers")


def packages_of(training: TrainingConfig) -> tuple[str, ...]:
    """Further packages that a training with these settings depends on. Raises UserError if one is not installed."""
    if training.base_bits:
        check_installed(field_of(training.base_bits))
    if training.has_8bit_moments:
        check_installed("training.optimizer")
    bitsandbytes = ("bitsandbytes",) if training.base_bits or training.has_8bit_moments else ()
    return (*bitsandbytes, "peft") if training.lora else bitsandbytes


class TrainingStageConfig(StageConfig):
    """Configuration of a stage that trains."""

    training: TrainingConfig

    def packages_used(self) -> tuple[str, ...]:
        return packages_of(self.training)
