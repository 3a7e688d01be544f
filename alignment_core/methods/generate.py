"""The method ``generate``: completions of prompts, without training."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rollout import GenerationConfig


class BatchConfig(Config):
    """Prompts and sampling of batch inference."""

    prompts: DataConfig
    """Prompts."""
    generation: GenerationConfig = GenerationConfig(num_generations=1)
    """Sampling parameters."""


class GenerateRecipe(BaseRecipe):
    """Completions of prompts: batch inference."""

    SAMPLES: ClassVar[bool] = True
    method: Literal["generate"] = "generate"
    """Batch inference. `align generate` writes a recipe of it by itself."""
    generate: BatchConfig
    """Prompts and sampling."""

    @model_validator(mode="after")
    def _only_samples(self) -> GenerateRecipe:
        for name in ("evaluation", "promotion"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` has no effect, as this recipe only samples: use `method: evaluate`")
        return self


def compose(recipe: GenerateRecipe) -> Outputs:
    """Compose the recipe."""
    model = steps.base_model("model", recipe.model)
    prompts = steps.dataset("generate/prompts", recipe.generate.prompts, "prompts", model, held_out=True)
    return Outputs(rollouts=steps.generate("generate", recipe.generate.generation, model, prompts))


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from prompts alone."""
    room = sections.answer_room(profile, least=256)
    return {
        "generate": {
            "prompts": sections.prompts(profile, profile.sources, room),
            "generation": sections.generation(1, room),
        }
    }


METHOD = Method(
    GenerateRecipe,
    compose,
    aliases=("batch inference", "batch_inference", "sample"),
    decides={"generate/prompts": "generate.prompts", "generate": "generate"},
    init=Init(
        kinds=("prompts",),
        sections=init_sections,
        why="prompts with nothing to learn from, which the model can only answer",
        rank=70,
        formats=("prompts", "messages"),
        evaluates=False,
        promotes=False,
    ),
)
