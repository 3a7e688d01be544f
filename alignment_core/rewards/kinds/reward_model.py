"""`reward_model`: a model that scores prompt and completion."""

from __future__ import annotations

from typing import ClassVar, Literal

from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import RewardKind, content_without_model
from alignment_core.rewards.model_reward import Judge, check_reads_images


class ModelReward(RewardConfig):
    """A reward model's score."""

    KEY: ClassVar[str] = "reward_model"
    may_return_none: ClassVar[bool] = False

    reward_model: Literal["ours"] | ModelConfig
    """Reward model: `ours` is the one of the recipe's section `reward_model`; anything else names a model. One with another
    tokenizer than the policy's scores text, and so does one with another chat template."""

    @property
    def model(self) -> Literal["ours"] | ModelConfig:
        return self.reward_model


REWARD = RewardKind(
    ModelReward,
    lambda reward, opening: Judge.open(opening, reward.normalise == "model"),
    description=lambda reward: "the reward model",
    content=content_without_model,
    packages=lambda reward: ("jinja2", "tokenizers", "torch", "transformers"),
    actors=True,
    check_images=check_reads_images,
)
