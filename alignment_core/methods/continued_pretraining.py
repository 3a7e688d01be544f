"""The method ``continued-pretraining``: next-token training on plain text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.composition import steps
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.data.kinds.documents import BLOCK_OVERLAP
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.training import TrainingConfig


class ContinuedPretrainingConfig(Config):
    """Continued pre-training: next-token loss on every token of documents."""

    data: DataConfig
    """Documents, in a column `text` or as `.txt` files. A document longer than `max_length` is cut into blocks of at most
    that many tokens. `test_rows` counts blocks; all blocks of a document go to the same split."""
    block_overlap: int = Field(0, ge=0)
    """Tokens of the block before with which each block of a long document begins. They give context and are not trained
    on again."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule. `batch_size` counts blocks."""

    @model_validator(mode="after")
    def _blocks_have_room(self, info: ValidationInfo) -> ContinuedPretrainingConfig:
        if self.block_overlap * 2 >= self.data.max_length and self.block_overlap:
            raise ValueError(
                f"`block_overlap` is {self.block_overlap}, but must be less than half of `data.max_length`, which is "
                f"{self.data.max_length}"
            )
        self.data.refuse_unused(info, ("overlong", "max_prompt_length"), "on documents: long ones are cut into blocks")
        self.training.check_held_out(self.data)
        self.data.refuse_unused(info, ("chat_template",), "on documents: they are plain text")
        return self


class ContinuedPretrainingRecipe(BaseRecipe):
    """Continued pre-training on plain text."""

    method: Literal["continued-pretraining"] = "continued-pretraining"
    """Continued pre-training."""
    continued_pretraining: ContinuedPretrainingConfig
    """Documents and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        section = self.continued_pretraining
        return (*super().measured_in_training, *section.training.measured(section.data, "test_loss"))


LABEL = "continued-pretraining"


def compose(recipe: ContinuedPretrainingRecipe) -> Outputs:
    """Compose the recipe."""
    section = recipe.continued_pretraining
    base = steps.base_model("model", recipe.model)
    settings = {BLOCK_OVERLAP: section.block_overlap}
    documents = steps.dataset(f"{LABEL}/data", section.data, "documents", base, settings=settings)
    policy = steps.continued_pretraining(LABEL, section.training, base, documents)
    return Evaluations(recipe, base).outputs({"start": base, LABEL: policy})


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from plain text."""
    section = {"data": sections.data(profile, documents=True), "training": sections.training(profile, 1e-5, 1e-3)}
    return {"continued_pretraining": section}


METHOD = Method(
    ContinuedPretrainingRecipe,
    compose,
    decides={
        "continued-pretraining/data:settings.block_overlap": "continued_pretraining.block_overlap",
        "continued-pretraining/data": "continued_pretraining.data",
        "continued-pretraining": "continued_pretraining",
    },
    aliases=("cpt", "pretraining", "language modelling"),
    init=Init(
        kinds=("documents",),
        sections=init_sections,
        why="plain text without prompts",
        rank=60,
        formats=("text",),
        evaluates=False,
    ),
)
