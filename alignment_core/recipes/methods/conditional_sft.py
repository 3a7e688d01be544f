"""The method ``conditional-sft``: fine-tuning on one's own completions with their attributes in the prompt."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.conditional_sft import FIELD, ConditionalSftConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class ConditionalSftRecipe(BaseRecipe):
    """SFT → completions → their attributes → SFT with these in the prompts → evaluation with the wanted values."""

    method: Literal["conditional-sft"] = "conditional-sft"
    """Conditional supervised fine-tuning (SteerLM)."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """A reward model that measures an attribute, with `reward_model: ours`."""
    conditional_sft: ConditionalSftConfig
    """Completions, attributes and training."""

    @property
    def samples(self) -> bool:
        """The start answers the prompts."""
        return True

    @model_validator(mode="after")
    def _has_its_rewards(self) -> ConditionalSftRecipe:
        if self.reward_model:
            self.reward_model.check_origin()
        listed = [one.reward for one in self.conditional_sft.attributes.values()]
        self.check_ours(listed, f"{FIELD}.attributes")
        self.check_used(listed, f"{FIELD}.attributes")
        return self


METHOD = Method(
    ConditionalSftRecipe,
    composition="alignment.flows.conditional_sft:conditional_sft",
    aliases=("steerlm", "decision-transformer", "attribute-conditioned"),
    decides={
        "conditional-sft/prompts": "conditional_sft.prompts",
        r"conditional-sft/reward-\d+:.*": "conditional_sft.attributes",
        "conditional-sft/(judge|attributes):.*": "conditional_sft.attributes",
        "conditional-sft/data": "conditional_sft.prompts",
        "conditional-sft/sample": "conditional_sft",
        r"wanted(-\d+)?/evaluation/prompts:.*": "conditional_sft.wanted",
        "conditional-sft": "conditional_sft",
    },
)
