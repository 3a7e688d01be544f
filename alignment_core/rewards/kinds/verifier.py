"""`verifier`: a number in [0, 1] for one completion, by a built-in verifier or a function."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment_core.recipes.paths import CodePath
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rewards import RewardConfig, check_verifier
from alignment_core.rewards.base import RewardKind
from alignment_core.rewards.verify import Verifier, verifier_code, verifier_content, verifier_packages


class VerifierReward(RewardConfig):
    """A verifier's score of one completion."""

    KEY: ClassVar[str] = "verifier"

    verifier: CodePath
    """Function that scores one completion: `task` (the built-in task's own), `math` (the answer equals the label), `code`
    (the program passes the label's tests), `reasoning_gym` (that library's own score), `module:function` or
    `file.py:function`. It is called with prompt, completion and label, and returns a number in [0, 1]."""

    def check(self, prompts: DataConfig, where: str) -> None:
        check_verifier(self.verifier, prompts, where)


def _content(reward: VerifierReward, field: str) -> dict[str, Any]:
    verifier = verifier_content(reward.verifier, f"{field}.verifier")
    return {**reward.model_dump(mode="json"), "verifier": verifier}


REWARD = RewardKind(
    VerifierReward,
    lambda reward, opening: opening.of_function(Verifier, reward.verifier, "verifier"),
    description=lambda reward: f"the verifier {reward.verifier}",
    content=_content,
    code=lambda reward: verifier_code(reward.verifier),
    packages=lambda reward: verifier_packages(reward.verifier),
    user_code=("verifier",),
)
