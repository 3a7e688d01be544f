"""Process reward models: which rows, what stands between steps, and how to train."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.training import TrainingConfig


class StepsConfig(Config):
    """How answers have steps, and how a model says what it thinks of each."""

    separator: str = Field("\n", min_length=1)
    """Ends a step. Answers are cut at it; where data gives steps apart, they must not contain it."""
    placeholder: str | None = Field(None, min_length=1)
    """Text of one token that is put behind each separator; a step is judged there. Default: at the step's last token."""
    verdict_tokens: tuple[str, str] = ("+", "-")
    """Texts of the tokens that say good and bad, one token each."""

    @field_validator("verdict_tokens")
    @classmethod
    def _differ(cls, tokens: tuple[str, str]) -> tuple[str, str]:
        if tokens[0] == tokens[1]:
            raise ValueError("the good and the bad verdict are the same token")
        return tokens


class ProcessRewardModelConfig(Config):
    """A process reward model: it judges each step of an answer."""

    data: DataConfig
    """Prompts, steps and a label for each step (true, false or a number from 0 to 1), in TRL's form or Math-Shepherd's."""
    steps: StepsConfig = StepsConfig()
    """Separator, placeholder and verdicts. They are stored with the model."""
    training: TrainingConfig = TrainingConfig()
    """Optimiser and schedule."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> ProcessRewardModelConfig:
        self.training.check_held_out(self.data)
        return self
