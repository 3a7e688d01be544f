"""`process_reward_model`: a model that judges the steps of an answer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, model_validator

from alignment_core.recipes.base import unkeyed
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.process_reward_model import StepsConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, RewardKind, content_without_model


class ProcessReward(RewardConfig):
    """What a process reward model thinks of the steps of an answer."""

    KEY: ClassVar[str] = "process_reward_model"
    may_return_none: ClassVar[bool] = False

    process_reward_model: Literal["ours"] | ModelConfig
    """Process reward model: `ours` is the one of the recipe's section `process_reward_model`; anything else names a model."""
    aggregate: Literal["min", "product", "last", "mean"] = "min"
    """The answer's reward: the smallest probability of its steps to be right, their product, the last one or their mean."""
    per_step: Literal["sum", "min"] | None = unkeyed(None)
    """In `rl.rewards`: reward steps at their last tokens instead of the answer at its end. `sum` rewards each step with its
    own probability (DeepSeekMath's process supervision: the estimator's baseline and deviation are those of all steps of the
    prompt's completions); `min` the worst step alone, so that what follows it has no part in it (the limit of PURE), which
    invites less to stop early. `aggregate` then is what metrics, filters and the choice of the best policy see."""
    steps: StepsConfig | None = None
    """How the model reads steps. Default: as it was trained here; needed for models from elsewhere."""

    @property
    def model(self) -> Literal["ours"] | ModelConfig:
        return self.process_reward_model

    @property
    def by_step(self) -> Literal["sum", "min"] | None:
        return self.per_step

    @model_validator(mode="after")
    def _keeps_its_steps(self, info: ValidationInfo) -> ProcessReward:
        if self.by_step:
            self.refuse_unused(info, ("clip", "normalise"), "with `per_step`, whose rewards are probabilities of steps")
        return self


def _open(reward: ProcessReward, opening: Opening) -> Any:
    from alignment_core.rewards.process_reward import StepJudge

    return StepJudge.open(opening, reward.steps, reward.aggregate, reward.per_step, reward.skip_special_tokens)


REWARD = RewardKind(
    ProcessReward,
    _open,
    description=lambda reward: f"the process reward model ({reward.aggregate})",
    content=content_without_model,
    code=lambda reward: ("alignment_core.rewards.process_reward", "alignment_core.data.steps"),
    packages=lambda reward: ("jinja2", "tokenizers", "torch", "transformers"),
    actors=True,
    reads_text=True,
)
