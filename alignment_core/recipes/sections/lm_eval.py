"""Benchmarks of EleutherAI's lm-evaluation-harness, the package `lm-eval`."""

from __future__ import annotations

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import ModelPath

PREFIX = "lm_eval/"
"""Of the metrics."""


class LmEvalConfig(Config):
    """Tasks of the library `lm-eval` (the extra `lm-eval`), which it samples and scores itself, by `transformers`."""

    tasks: tuple[ModelPath, ...] = Field(min_length=1)
    """Names of its tasks or groups, or paths of YAML files of tasks of one's own."""
    num_fewshot: int | None = Field(None, ge=0)
    """Examples before each question. Default: the task's own number."""
    limit: int | None = Field(None, ge=1)
    """Questions of each task. Default: all."""
    batch_size: int = Field(8, ge=1)
    """Sequences at a time."""
    apply_chat_template: bool = False
    """Put questions into the model's chat template."""

    @model_validator(mode="after")
    def _names_each_once(self) -> LmEvalConfig:
        if len({*self.tasks}) < len(self.tasks):
            raise ValueError("`tasks`: a task is named twice; remove one")
        return self
