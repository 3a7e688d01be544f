"""The method ``generate``: completions of prompts, without training."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rollout import GenerationConfig


class BatchConfig(Config):
    """What to answer, and how."""

    prompts: DataConfig
    """Prompts."""
    generation: GenerationConfig = GenerationConfig(num_generations=1)
    """Sampling parameters."""


class GenerateRecipe(BaseRecipe):
    """Completions of prompts: batch inference."""

    method: Literal["generate"] = "generate"
    """Batch inference. `align generate` writes a recipe of it by itself."""
    generate: BatchConfig
    """Prompts and sampling."""

    @property
    def samples(self) -> bool:
        """The model answers the prompts."""
        return True

    @model_validator(mode="after")
    def _only_samples(self) -> GenerateRecipe:
        for name in ("evaluation", "promotion"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` has no effect, as this recipe only samples: use `method: evaluate`")
        return self


METHOD = Method(
    GenerateRecipe,
    composition="alignment.flows.generate:generate",
    aliases=("batch inference", "batch_inference", "sample"),
    decides={"generate/prompts": "generate.prompts", "generate": "generate"},
)
