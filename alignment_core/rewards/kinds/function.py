"""`function`: a function of the user's that rewards all completions of a prompt at once."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment_core.recipes.paths import CodePath
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import RewardKind
from alignment_core.rewards.group_function import GroupFunction
from alignment_core.user_code.functions import function_content


class FunctionReward(RewardConfig):
    """Rewards that a Python function returns for all completions of a prompt."""

    KEY: ClassVar[str] = "function"

    function: CodePath
    """Reward function of all completions of a prompt at once: `module:function` or `file.py:function`, optionally
    `async`. It is called with a list of dicts and returns one number for each, or None (see `missing`)."""


def _content(reward: FunctionReward, field: str) -> dict[str, Any]:
    function = function_content(reward.function, f"{field}.function")
    return {**reward.model_dump(mode="json"), "function": function}


REWARD = RewardKind(
    FunctionReward,
    lambda reward, opening: opening.of_function(GroupFunction, reward.function, "function"),
    description=lambda reward: f"the function {reward.function}",
    content=_content,
    user_code=("function",),
)
