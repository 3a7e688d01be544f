"""Benchmarks of EleutherAI's lm-evaluation-harness, the package `lm-eval`."""

from __future__ import annotations

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import ModelPath

PREFIX = "lm_eval/"
"""Prefix of the metrics."""


class LmEvalConfig(Config):
    """Tasks of the library `lm-eval` (the extra `lm-eval`), which samples and scores by `transformers`."""

    tasks: tuple[ModelPath, ...] = Field(min_length=1)
    """Names of tasks or groups of the library, or paths of YAML files of your own tasks."""
    num_fewshot: int | None = Field(None, ge=0)
    """Number of examples before each question. Default: the task's own number."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of questions per task. Default: all."""
    batch_size: int = Field(8, ge=1)
    """Number of sequences per batch."""
    apply_chat_template: bool = False
    """Format questions with the model's chat template."""

    @model_validator(mode="after")
    def _names_each_once(self) -> LmEvalConfig:
        if len({*self.tasks}) < len(self.tasks):
            raise ValueError("`tasks`: a task is named twice; remove one")
        return self
