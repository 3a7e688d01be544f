"""The method ``merge``: one policy whose weights are an average of several."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, fine_tuned
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import Input, submit
from alignment_core.composition.results import Outputs
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.training import SftConfig
from alignment_core.stages.merge import BASE, MergeStageConfig


class MergedModel(Config):
    """One of the models that are merged."""

    model: ModelConfig | None = None
    """The model. Default: the start, that is the recipe's `model`, fine-tuned if there is a section `sft`."""
    sft: SftConfig | None = None
    """Fine-tune it on demonstrations before it is merged."""
    weight: float = Field(1.0, ge=0)
    """Its weight, relative to the others'."""


class MergeConfig(Config):
    """Which models, and how their weights become one."""

    models: tuple[MergedModel, ...] = Field(min_length=2)
    """The models, all of one architecture and tokenizer."""
    merge_method: Literal["linear", "slerp", "ties"] = "linear"
    """`linear`: the weighted mean (model soups). `slerp`: the start, plus the changes that two models made to it, interpolated
    on the arc between them (WARP). `ties`: the start, plus the changes that each model made to it, trimmed and without those
    that contradict the majority (TIES-Merging)."""
    density: float = Field(0.2, gt=0, le=1)
    """Share of each model's changes that is kept, the largest ones of all tensors together; only with `ties`."""
    scale: float = Field(1.0, gt=0)
    """Factor of the merged changes (λ); only with `ties`."""

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> MergeConfig:
        if self.merge_method != "ties":
            self.refuse_unused(info, ("density", "scale"), f"with `merge_method: {self.merge_method}`")
        if self.merge_method == "slerp" and len(self.models) != 2:
            raise ValueError(f"`merge_method: slerp` takes two models, not {len(self.models)}: use `linear` or `ties`")
        if not any(model.weight for model in self.models):
            raise ValueError("`models`: all weights are 0; give at least one of them more")
        for number, model in enumerate(self.models):
            if any(model.model == other.model and model.sft == other.sft for other in self.models[:number]):
                raise ValueError(f"`models.{number}` is the same model as one before it: change its `model` or `sft`")
        return self


class MergeRecipe(BaseRecipe):
    """Several models → one average of their weights → evaluation → promotion."""

    method: Literal["merge"] = "merge"
    """An average of models."""
    sft: SftConfig | None = None
    """Fine-tune `model` on demonstrations first; this is then the start of the models that are merged."""
    merge: MergeConfig
    """The models and how to merge them."""


def compose(recipe: MergeRecipe) -> Outputs:
    """Compose the recipe."""
    section = recipe.merge
    base, start = base_and_start(recipe, recipe.sft)
    models: dict[str, Input] = {}
    for number, merged in enumerate(section.models, start=1):
        label = f"model-{number}"
        own = steps.base_model(label, merged.model) if merged.model else None
        model = own or start
        models[label] = fine_tuned(f"{label}/sft", merged.sft, model, own or base) if merged.sft else model
    config = MergeStageConfig(
        merge_method=section.merge_method,
        weights=tuple(model.weight for model in section.models),
        density=section.density if section.merge_method == "ties" else None,
        scale=section.scale if section.merge_method == "ties" else None,
    )
    policy = submit("merge", "merge", config, {**models, BASE: start if section.merge_method != "linear" else None})
    return Evaluations(recipe, base).outputs({"start": start, **models, "merge": policy})


METHOD = Method(
    MergeRecipe,
    compose,
    decides={
        r"model-\d+(/.*)?": "merge.models",
        "merge": "merge",
    },
)
