"""Where the methods that improve a policy begin: the base model, fine-tuned on demonstrations if the recipe says so."""

from __future__ import annotations

from alignment_core.recipes import BaseRecipe, RewardModelConfig, SftConfig
from tasks import data, training
from tasks.graph import Input


def base_and_start(recipe: BaseRecipe, sft: SftConfig | None) -> tuple[Input, Input]:
    """The base model, whose tokenizer prepares all data, and the policy that the method starts from."""
    base = data.base_model("model", recipe.model)
    if sft is None:
        return base, base
    demonstrations = data.dataset("sft/data", sft.data, "demonstrations", base)
    return base, training.sft("sft", sft.training, base, demonstrations)


def reward_model(recipe: BaseRecipe, section: RewardModelConfig | None, base: Input, start: Input) -> Input | None:
    """The judge: trained from the SFT model, given by the recipe, or none."""
    if section is None:
        return None
    if section.model is not None:
        return data.base_model("reward-model", section.model, kinds=("reward-model", "model"))
    assert section.data is not None, "the recipe is validated"
    pairs = data.dataset("reward-model/data", section.data, "preferences", base)
    return training.reward_model("reward-model", section, start, pairs)
