"""Process reward models: rows, steps and training."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.recipes.base import Config, unkeyed
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.training import TrainingConfig


class StepsConfig(Config):
    """Steps of answers, and verdicts on them."""

    separator: str = Field("\n", min_length=1)
    """Text that ends a step. Answers are split at it; steps that are given as a list must not contain it."""
    placeholder: str | None = Field(None, min_length=1)
    """Text of one token that is added after each separator, where the step is judged. Default: the step's last token."""
    placeholder_prefix: str | None = unkeyed(None)
    """Text between a step and its placeholder; the separator then follows the placeholder. Math-Shepherd has a space there.
    Default: the separator."""
    answer_prefix: str = unkeyed("")
    """Text between a prompt and the first step without a chat template. Math-Shepherd has a space there."""
    verdict_tokens: tuple[str, str] = ("+", "-")
    """Texts of the tokens for a good and a bad step, one token each."""

    @model_validator(mode="after")
    def _has_a_placeholder(self) -> StepsConfig:
        if self.placeholder_prefix is not None and self.placeholder is None:
            raise ValueError("`placeholder_prefix` precedes a placeholder, and there is none: add `placeholder`")
        return self

    @field_validator("verdict_tokens")
    @classmethod
    def _differ(cls, tokens: tuple[str, str]) -> tuple[str, str]:
        if tokens[0] == tokens[1]:
            raise ValueError("the good and the bad verdict are the same token")
        return tokens


class ProcessRewardModelConfig(Config):
    """A process reward model, which judges each step of an answer."""

    data: DataConfig
    """Prompts, steps and a label for each step (true, false or a number from 0 to 1), in TRL's form or Math-Shepherd's."""
    steps: StepsConfig = StepsConfig()
    """Separator, placeholder and verdicts. They are stored with the model."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, warmup_ratio=0.03)
    """Optimiser and schedule. OpenRLHF's script for Math-Shepherd trains a model of 7B with the same learning rate."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self, info: ValidationInfo) -> ProcessRewardModelConfig:
        self.training.check_held_out(self.data)
        self.training.refuse_unused(info, ("keep_master_weights",), "because nothing trains a reward model further")
        return self
