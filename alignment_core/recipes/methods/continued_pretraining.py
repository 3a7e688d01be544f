"""The method ``continued-pretraining``: next-token training on plain text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.method import Method
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
    training: TrainingConfig = TrainingConfig()
    """Optimiser and schedule. `batch_size` counts blocks."""

    @model_validator(mode="after")
    def _blocks_have_room(self) -> ContinuedPretrainingConfig:
        if self.block_overlap * 2 >= self.data.max_length and self.block_overlap:
            raise ValueError(
                f"`block_overlap` is {self.block_overlap}, but must be less than half of `data.max_length`, which is "
                f"{self.data.max_length}"
            )
        self.data.refuse_unused(("overlong", "max_prompt_length"), "on documents: long ones are cut into blocks")
        self.training.check_held_out(self.data)
        self.data.refuse_unused(("chat_template",), "on documents: they are plain text")
        return self


class ContinuedPretrainingRecipe(BaseRecipe):
    """Continued pre-training on plain text."""

    method: Literal["continued-pretraining"] = "continued-pretraining"
    """Continued pre-training."""
    continued_pretraining: ContinuedPretrainingConfig
    """Documents and training."""


METHOD = Method(
    ContinuedPretrainingRecipe,
    composition="alignment.flows.continued_pretraining:continued_pretraining",
    decides={
        "continued-pretraining/data:settings.block_overlap": "continued_pretraining.block_overlap",
        "continued-pretraining/data": "continued_pretraining.data",
        "continued-pretraining": "continued_pretraining",
    },
    aliases=("cpt", "pretraining", "language modelling"),
)
