"""The method ``iterative-dpo``: rounds of generate, score, select, train."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class IterativeDpoRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, select, train → evaluation → promotion."""

    method: Literal["iterative-dpo"] = "iterative-dpo"
    """Iterative DPO."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model; may be left out if `iterative_dpo.rewards` or `iterative_dpo.selection` name something else."""
    iterative_dpo: IterativeDpoConfig
    """The rounds."""

    @property
    def samples(self) -> bool:
        """Every round does."""
        return True

    @model_validator(mode="after")
    def _has_a_judge(self) -> IterativeDpoRecipe:
        check_rounds(self, self.reward_model, self.iterative_dpo)
        return self


def check_rounds(recipe: BaseRecipe, reward_model: RewardModelConfig | None, rounds: IterativeDpoConfig | None) -> None:
    """Raise ValueError unless there is something that ranks the completions of the recipe's rounds."""
    if reward_model:
        reward_model.check_origin()
    if rounds is None:
        recipe.check_used((), "evaluation.rewards")
        return
    recipe.check_ours(rounds.rewards, "iterative_dpo.rewards")
    if rounds.rewards:
        recipe.check_used(rounds.rewards, "iterative_dpo.rewards")
    evaluation, by_verifier = recipe.evaluation, rounds.selection.score == "verifier"
    if not rounds.rewards and reward_model is None and not by_verifier:
        raise ValueError(
            "`reward_model` is needed, because `iterative_dpo.selection.score` is `reward`: add it, or list "
            "`iterative_dpo.rewards`"
        )
    if by_verifier and not (evaluation and evaluation.verifier):
        raise ValueError("`evaluation.verifier` is needed, because `iterative_dpo.selection.score` is `verifier`")
    if by_verifier and evaluation:
        evaluation.check_verifier(rounds.prompts, "iterative_dpo.prompts")


METHOD = Method(
    IterativeDpoRecipe,
    composition="flows.iterative_dpo:iterative_dpo",
    decides={
        "rounds/prompts": "iterative_dpo.prompts",
        r"rounds/reward-\d+:.*": "iterative_dpo.rewards",
        r"round-\d+/score:rewards.*": "iterative_dpo.rewards",
        r"round-\d+/score": "evaluation",
        r"round-\d+/generate:prompts": "iterative_dpo.prompts_per_round",
        r"round-\d+/generate:first_prompt": "the first prompt",
        r"round-\d+/reference-logps:order": "the order of the rows",
        r"round-\d+/reference-logps": "iterative_dpo.training",
        r"round-\d+/(generate|select|dpo)": "iterative_dpo",
    },
)
