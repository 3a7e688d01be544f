"""Stages before a method: the base model, fine-tuned on demonstrations if the recipe says so, and reward models."""

from __future__ import annotations

from collections.abc import Sequence

from alignment_core.composition import steps
from alignment_core.composition.graph import Input, Step
from alignment_core.composition.steps import Rewards
from alignment_core.recipes import BaseRecipe, ModelConfig, RewardModelConfig, SftConfig
from alignment_core.recipes.sections.rewards import RewardConfig, ours

REWARD_MODELS = ("reward-model", "model")
"""Kinds of artifacts that may be a reward model."""
PROCESS_REWARD_MODELS = ("process-reward-model", "model")
"""Kinds of artifacts that may be a process reward model."""


def base_and_start(recipe: BaseRecipe, sft: SftConfig | None) -> tuple[Input, Input]:
    """The base model, whose tokenizer prepares all data, and the policy that the method starts from."""
    base = steps.base_model("model", recipe.model)
    if sft is None:
        return base, base
    return base, fine_tuned("sft", sft, base, base)


def fine_tuned(label: str, section: SftConfig, model: Input, tokenizer: Input) -> Step:
    """``model``, fine-tuned on the demonstrations of ``section`` in the tokens of ``tokenizer``."""
    demonstrations = steps.dataset(f"{label}/data", section.data, "demonstrations", tokenizer)
    options = section.model_dump(include={"disable_dropout", "neftune_noise_alpha"})
    return steps.sft(label, section.training, model, demonstrations, **options)


def reward_model(section: RewardModelConfig | None, base: Input, start: Input) -> Input | None:
    """The reward model: trained from the SFT model, named by the recipe, or none."""
    if section is None:
        return None
    if section.model is not None:
        return steps.base_model("reward-model", section.model, kinds=REWARD_MODELS)
    assert section.data is not None, "the recipe is validated"
    pairs = steps.dataset("reward-model/data", section.data, "preferences", base)
    return steps.reward_model("reward-model", section, start, pairs)


def rewards(
    field: str,
    listed: Sequence[RewardConfig],
    judge: Input | None,
    label: str,
    process_judge: Input | None = None,
) -> Rewards:
    """The rewards that the recipe has ``listed`` at ``field``, and the models that they need.

    Default: the reward model ``judge``. ``ours`` is ``judge`` or ``process_judge``; other models become stages below ``label``.
    """
    configs = tuple(listed) or ((ours(),) if judge is not None else ())
    models: dict[str, Input] = {}
    for number, reward in enumerate(configs):
        of_steps = reward.KEY == "process_reward_model"
        ours_of_kind = process_judge if of_steps else judge
        if isinstance(reward.model, ModelConfig):
            kinds = PROCESS_REWARD_MODELS if of_steps else REWARD_MODELS
            models[f"reward-{number}"] = steps.base_model(f"{label}/reward-{number}", reward.model, kinds)
        elif reward.model == "ours" and ours_of_kind is not None:
            models[f"reward-{number}"] = ours_of_kind
    return Rewards(field, configs, models)
