"""The method ``process-reward-model``: a model that judges the steps of answers, and the best of n answers by it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, reward_model
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.process_reward_model import ProcessRewardModelConfig, StepsConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig
from alignment_core.rewards.base import kind_of


class ProcessRewardModelRecipe(BaseRecipe):
    """A model that judges the steps of answers, and the accuracy of the best of n answers by it."""

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


def compose(recipe: ProcessRewardModelRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    outcome = reward_model(recipe.reward_model, base, start)
    judge = steps.process_reward_model("process-reward-model", recipe.process_reward_model, start, base)
    evaluations = Evaluations(recipe, base, outcome, judge)
    if recipe.evaluation:
        label = "sft" if recipe.sft else "start"
        evaluations.add(label, start)
        names = [kind_of(reward).description(reward).removeprefix("the ") for reward in recipe.evaluation.rewards]
        best = f"{label}/evaluation/best-of-n"
        steps.best_of_n(best, names, recipe.evaluation.confidence, evaluations.scores[label])
    return Outputs(reward_model=judge, report=evaluations.report(), evaluations=evaluations)


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from answers with a label for each step."""
    return {
        "process_reward_model": {"data": sections.data(profile), "training": sections.training(profile, 1e-6, 1e-3)}
    }


METHOD = Method(
    ProcessRewardModelRecipe,
    compose,
    aliases=("prm", "step-level reward model"),
    decides={
        "process-reward-model/data:settings": "process_reward_model.steps",
        "process-reward-model/data": "process_reward_model.data",
        "process-reward-model": "process_reward_model",
    },
    init=Init(
        kinds=("stepwise",),
        sections=init_sections,
        why="answers in steps, with a label for each step",
        rank=10,
        formats=("stepwise", "math_shepherd"),
        evaluates=False,
        promotes=False,
        settings=StepsConfig().model_dump(exclude={"verdict_tokens"}),
    ),
)
