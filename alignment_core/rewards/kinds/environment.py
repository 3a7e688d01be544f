"""`environment: true`: the sum of the rewards that an environment returned over the turns of a completion."""

from __future__ import annotations

from typing import ClassVar, Literal

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, RewardKind, Rows
from alignment_core.rewards.results import Answers


class EnvironmentReward(RewardConfig):
    """The rewards of the environment of reinforcement learning."""

    KEY: ClassVar[str] = "environment"
    of_environment: ClassVar[bool] = True

    environment: Literal[True]
    """Use the sum of the rewards that `rl.environment` returned over the turns of the completion."""


class OfEnvironment:
    """The rewards that the rows' environments returned, or their failures."""

    def __call__(self, rows: Rows) -> Answers:
        yield from ((number, row["environment"]) for number, row in enumerate(rows))

    def close(self) -> None:
        """Nothing was started."""


def _open(reward: EnvironmentReward, opening: Opening) -> OfEnvironment:
    return OfEnvironment()


REWARD = RewardKind(EnvironmentReward, _open, description=lambda reward: "the environment")
