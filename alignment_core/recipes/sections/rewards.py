"""Rewards of completions. Each kind of reward is a plug-in: alignment_core/rewards/kinds has those of ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from alignment_core.plugins import Group
from alignment_core.recipes.base import Config
from alignment_core.recipes.choice import OneOf
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.model import ModelConfig

REWARDS = Group(
    "alignment.rewards",
    "alignment_core.rewards.kinds",
    "REWARD",
    "kind of reward",
    "alignment_core.rewards.base:RewardKind",
)
VERIFIERS = Group(
    "alignment.verifiers",
    "alignment_core.rewards.verifiers",
    "VERIFIER",
    "verifier",
    "alignment_core.rewards.named:NamedVerifier",
)


class RewardConfig(Config):
    """One reward: the fields of one of the kinds below, and these."""

    KEY: ClassVar[str]
    """The field that says so."""
    of_environment: ClassVar[bool] = False
    """Whether it needs the episodes of an environment."""
    may_return_none: ClassVar[bool] = True
    """Whether it may have None for a completion without having failed."""

    weight: float = 1.0
    """Weight in the sum of all rewards."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound to which each reward is clipped, before any other processing."""
    normalise: Literal["none", "group", "batch", "running", "model"] = "none"
    """Subtract the mean and divide by the standard deviation of the rewards: of the prompt's completions (`group`), of
    the step (`batch`), of all steps so far (`running`), or of answers that the reward model was trained on, as it says itself
    (`model`; before `clip`)."""
    max_failed: float = Field(0.01, ge=0, le=0.5)
    """Largest share of a step's completions that may lack this reward, and at least one unless it is 0; they are counted and
    left out."""
    missing: Literal["ignore", "fail"] | None = Field(None, exclude_if=lambda meaning: meaning is None)
    """Meaning of None in place of a reward (null from an endpoint). With `ignore` the completion's other rewards are summed
    without it, so that functions of several tasks can return None for each other's rows; a completion that all rewards
    ignore has no reward. With `fail` it counts towards `max_failed`. Default: `ignore` for a function with TRL's
    parameters, as in TRL, and `fail` otherwise."""
    skip_special_tokens: bool = Field(True, exclude_if=lambda skips: skips)
    """Whether special tokens are left out of the text of a completion that is rewarded. With `false` the reward sees those
    that the policy sampled, such as `<think>` where the tokenizer has it as a special token; the token that ends a turn is
    never shown. Models that read the policy's token ids see all tokens in any case."""

    @property
    def model(self) -> Literal["ours"] | ModelConfig | None:
        """The model that it needs, `ours` for that of the recipe's section that is called as the reward's ``KEY``."""
        return None

    @property
    def by_step(self) -> Literal["sum", "min"] | None:
        """Whether it rewards steps of a completion at their last tokens instead of the whole at its end: all of them
        (`sum`), or the worst one (`min`)."""
        return None

    def check(self, prompts: DataConfig, where: str) -> None:
        """Raise ValueError if it cannot reward completions of these prompts, which the recipe has at ``where``."""

    @classmethod
    def alternatives(cls) -> tuple[type[Config], ...]:
        return tuple(CHOICE.kinds.values()) if cls is RewardConfig else ()

    @model_validator(mode="after")
    def _has_ordered_bounds(self) -> RewardConfig:
        if self.clip and self.clip[0] >= self.clip[1]:
            raise ValueError("`clip` needs a lower and then an upper bound")
        if self.of_environment:
            self.refuse_unused(
                ("skip_special_tokens",),
                "here",
                "set `rl.environment.skip_special_tokens`, which the environment's text follows",
            )
        if not self.may_return_none:
            self.refuse_unused(
                ("missing",), f"for `{self.KEY}`", "a model never returns None, and its failures count in `max_failed`"
            )
        if self.normalise == "model" and self.KEY != "reward_model":
            raise ValueError(
                "`normalise: model` is for a `reward_model`, which knows the mean and deviation of its rewards"
            )
        return self


CHOICE = OneOf(REWARDS, "a reward")
Reward = Annotated[RewardConfig, CHOICE]
"""A reward of any kind."""


def ours() -> RewardConfig:
    """The reward that the recipe's section ``reward_model`` stands for where no list of rewards is given."""
    reward: RewardConfig = CHOICE.validate({"reward_model": "ours"})
    return reward


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """A name for each reward, as metrics and samples call it: that of its function or verifier, or else its kind. Where
    several have one name, their numbers in the list follow it."""
    names = []
    for reward in rewards:
        value = getattr(reward, reward.KEY)
        named = reward.KEY in ("function", "verifier") and isinstance(value, str)
        name = value.rpartition(":")[2] if named else "endpoint" if reward.KEY == "urls" else reward.KEY
        names.append(re.sub(r"[^\w.-]+", "_", name))
    numbered = [f"{name}_{number}" for number, name in enumerate(names)]
    unique = [name if names.count(name) == 1 else other for name, other in zip(names, numbered, strict=True)]
    return unique if len(set(unique)) == len(unique) else numbered


def check_rewards(rewards: Sequence[RewardConfig], field: str, prompts: DataConfig, where: str) -> None:
    """Raise ValueError if one of ``rewards``, which the recipe has at ``field``, cannot be given to completions of the
    prompts at ``where`` that no environment took part in."""
    for number, reward in enumerate(rewards):
        if reward.of_environment:
            raise ValueError(
                f"`{field}.{number}` is an environment's reward, which only `rl.rewards` can use: remove it"
            )
        if reward.by_step:
            raise ValueError(f"`{field}.{number}.per_step` is for `rl.rewards`, where tokens are rewarded: remove it")
        reward.check(prompts, where)


def check_verifier(name: str, prompts: DataConfig, where: str, cure: str = "") -> None:
    """Raise ValueError if the verifier is one of the built-in tasks alone, and a source of ``prompts`` is none of them."""
    if not is_named(name) or not VERIFIERS.load(plugin_name(name)).tasks_only:
        return
    other = next((source.origin for source in prompts.sources if source.task is None), None)
    if other is not None:
        raise ValueError(f"`verifier: {name}` scores only built-in tasks, but {other} of `{where}` is not one{cure}")


def is_named(name: str) -> bool:
    """Whether a verifier is a plug-in, not a function."""
    return plugin_name(name) in VERIFIERS.names()


def plugin_name(name: str) -> str:
    """The name by which plug-ins know the verifier ``reasoning_gym``."""
    return name.replace("_", "-")
