"""Rewards of completions. Each kind of reward is a plug-in; ours are in alignment_core/rewards/kinds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.plugins import Group
from alignment_core.recipes.base import Config, unkeyed
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
    """A reward: these fields, and those of one of the kinds below."""

    KEY: ClassVar[str]
    """The field that selects this kind."""
    of_environment: ClassVar[bool] = False
    """Whether this kind needs episodes of an environment."""
    may_return_none: ClassVar[bool] = True
    """Whether None for a completion is no failure of this kind."""

    weight: float = 1.0
    """Weight in the sum of all rewards."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound to which each reward is clipped, before any other processing. Default in `rl` with a critic, for a
    reward model whose score is not normalised otherwise: −10 and 10 (OpenRLHF 0.11), so that a single score cannot dominate
    the values. Null disables it."""
    normalise: Literal["none", "group", "batch", "running", "model"] = "none"
    """Subtract the mean and divide by the standard deviation of rewards: of the prompt's completions (`group`), of the step
    (`batch`), of all steps so far (`running`), or of the reward model's training answers, which are stored with the model
    (`model`; before `clip`)."""
    max_failed: float = Field(0.01, ge=0, le=0.5)
    """Maximum share of a step's completions that may lack this reward (at least one completion, unless it is 0). They are
    counted and left out."""
    missing: Literal["ignore", "fail"] | None = unkeyed(None)
    """Meaning of None as a reward (null from an endpoint). `ignore` sums the completion's other rewards without it, so that
    functions of several tasks can return None for each other's rows; a completion for which all rewards are None has no
    reward. `fail` counts it towards `max_failed`. Default: `ignore` for a function with TRL's parameters, as in TRL, and
    `fail` otherwise."""
    skip_special_tokens: bool = unkeyed(True)
    """Remove special tokens from the text of rewarded completions. With `false` the text has the sampled special tokens,
    such as `<think>` if it is one in the tokenizer; the end-of-turn token is always removed. Models that read the policy's
    token ids see all tokens in any case."""

    @property
    def model(self) -> Literal["ours"] | ModelConfig | None:
        """The model of the reward; `ours` is that of the recipe's section with the name ``KEY``."""
        return None

    @property
    def by_step(self) -> Literal["sum", "min"] | None:
        """For rewards of the steps of a completion at their last tokens: all steps (`sum`), or only the worst one (`min`). None
        for a reward of the whole completion."""
        return None

    def check(self, prompts: DataConfig, where: str) -> None:
        """Raise ValueError if it cannot reward completions of the prompts at ``where`` in the recipe."""

    @classmethod
    def alternatives(cls) -> tuple[type[Config], ...]:
        return tuple(CHOICE.kinds.values()) if cls is RewardConfig else ()

    @model_validator(mode="after")
    def _has_ordered_bounds(self, info: ValidationInfo) -> RewardConfig:
        if self.clip and self.clip[0] >= self.clip[1]:
            raise ValueError("`clip` needs a lower and then an upper bound")
        if self.of_environment:
            self.refuse_unused(
                info,
                ("skip_special_tokens",),
                "here",
                "set `rl.environment.skip_special_tokens`",
            )
        if not self.may_return_none:
            self.refuse_unused(
                info,
                ("missing",),
                f"for `{self.KEY}`",
                "a model never returns None; its failures count towards `max_failed`",
            )
        if self.normalise == "model" and self.KEY != "reward_model":
            raise ValueError("`normalise: model` is for a `reward_model`, with which mean and deviation are stored")
        return self


CHOICE = OneOf(REWARDS, "a reward")
Reward = Annotated[RewardConfig, CHOICE]
"""A reward of any kind."""


def ours() -> RewardConfig:
    """The reward of the recipe's section ``reward_model``, the default of lists of rewards."""
    reward: RewardConfig = CHOICE.validate({"reward_model": "ours"})
    return reward


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """The name of each reward in metrics and samples: that of its function or verifier, or else of its kind. Repeated names get
    the reward's number in the list."""
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
    """Raise ValueError if one of the rewards at ``field`` cannot reward completions of the prompts at ``where`` without an
    environment."""
    for number, reward in enumerate(rewards):
        if reward.of_environment:
            raise ValueError(
                f"`{field}.{number}` is an environment's reward, which only `rl.rewards` can use: remove it"
            )
        if reward.by_step:
            raise ValueError(f"`{field}.{number}.per_step` is for `rl.rewards`, where tokens are rewarded: remove it")
        reward.check(prompts, where)


def check_verifier(name: str, prompts: DataConfig, where: str, cure: str = "") -> None:
    """Raise ValueError if the verifier is for built-in tasks only, and a source of ``prompts`` is not a built-in task."""
    if not is_named(name) or not VERIFIERS.load(plugin_name(name)).tasks_only:
        return
    other_source = next((source.origin for source in prompts.sources if source.task is None), None)
    if other_source is not None:
        raise ValueError(
            f"`verifier: {name}` scores only built-in tasks, but {other_source} of `{where}` is not one{cure}"
        )


def is_named(name: str) -> bool:
    """Whether a verifier is a plug-in, and not a function."""
    return plugin_name(name) in VERIFIERS.names()


def plugin_name(name: str) -> str:
    """The plug-in name of a verifier: ``reasoning-gym`` for ``reasoning_gym``."""
    return name.replace("_", "-")
