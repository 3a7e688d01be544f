"""The method ``process-reward-model``: a model that judges the steps of answers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.process_reward_model import ProcessRewardModelConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class ProcessRewardModelRecipe(BaseRecipe):
    """A model that judges the steps of answers, and what it is worth in choosing the best of n."""

    method: Literal["process-reward-model"] = "process-reward-model"
    """Process reward model (PRM): a verdict for each step of an answer."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first; the reward models start from the result, and its answers are judged."""
    reward_model: RewardModelConfig | None = None
    """An outcome reward model to compare with, as `{reward_model: ours}` of `evaluation.rewards`."""
    process_reward_model: ProcessRewardModelConfig
    """Answers with labels of their steps, and training."""

    @model_validator(mode="after")
    def _chooses_among_several(self) -> ProcessRewardModelRecipe:
        if self.promotion:
            raise ValueError("this recipe trains no policy that could be promoted: remove `promotion`")
        if self.reward_model:
            self.reward_model.check_origin()
            if self.evaluation is None:
                raise ValueError("`reward_model` is there to be compared: add `evaluation`, or remove it")
            self.check_used((), "evaluation.rewards")
        if (evaluation := self.evaluation) is None:
            return self
        if not evaluation.rewards:
            raise ValueError(
                "`evaluation.rewards` lists what chooses the best answer: add {process_reward_model: ours}, or remove "
                "`evaluation`"
            )
        if evaluation.verifier is None:
            raise ValueError(
                "`evaluation.verifier` says which answers are right, which the best of n are measured by: add it"
            )
        if evaluation.generation.num_generations < 2:
            raise ValueError("`evaluation.generation.num_generations` needs at least 2 answers to choose from")
        return self


METHOD = Method(
    ProcessRewardModelRecipe,
    composition="alignment.flows.process_reward_model:process_reward_model",
    aliases=("prm", "step-level reward model"),
    decides={
        "process-reward-model/data:settings": "process_reward_model.steps",
        "process-reward-model/data": "process_reward_model.data",
        "process-reward-model": "process_reward_model",
    },
)
