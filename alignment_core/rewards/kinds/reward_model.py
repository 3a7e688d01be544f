"""`reward_model`: a model that scores prompt and completion."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, RewardKind
from alignment_core.rewards.model_reward import Judge


class ModelReward(RewardConfig):
    """A reward model's score."""

    KEY: ClassVar[str] = "reward_model"
    may_return_none: ClassVar[bool] = False

    reward_model: Literal["ours"] | ModelConfig
    """Reward model: `ours` is the one of the recipe's section `reward_model`; anything else names a model. One with another
    tokenizer than the policy's scores text."""

    @property
    def model(self) -> Literal["ours"] | ModelConfig:
        return self.reward_model


def _content(reward: ModelReward, field: str) -> dict[str, Any]:
    return {**reward.model_dump(mode="json"), "reward_model": True}  # which one is an input


def _open(reward: ModelReward, opening: Opening) -> Judge:
    return Judge.open(opening, reward.normalise == "model")


REWARD = RewardKind(
    ModelReward,
    _open,
    description=lambda reward: "the reward model",
    content=_content,
    packages=lambda reward: ("jinja2", "tokenizers", "torch", "transformers"),
    actors=True,
)
