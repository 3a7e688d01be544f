"""The method ``iterative-dpo``: rounds of generate, score, select, train."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.evaluation import EvaluationConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class IterativeDpoRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, select, train → evaluation → promotion."""

    method: Literal["iterative-dpo"] = "iterative-dpo"
    """Iterative DPO."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model; may be left out when `iterative_dpo.selection.score` is `verifier`."""
    iterative_dpo: IterativeDpoConfig
    """The rounds."""

    @property
    def samples(self) -> bool:
        """Every round does."""
        return True

    @model_validator(mode="after")
    def _has_a_judge(self) -> IterativeDpoRecipe:
        check_rounds(self.reward_model, self.iterative_dpo, self.evaluation)
        return self


def check_rounds(
    reward_model: RewardModelConfig | None, rounds: IterativeDpoConfig | None, evaluation: EvaluationConfig | None
) -> None:
    """Raise ValueError unless there is something that ranks the completions of the rounds."""
    if reward_model:
        reward_model.check_origin()
    if rounds is None:
        return
    if reward_model is None and rounds.selection.score == "reward":
        raise ValueError("`reward_model` is needed, because `iterative_dpo.selection.score` is `reward`")
    if rounds.selection.score == "verifier" and not (evaluation and evaluation.verifier):
        raise ValueError("`evaluation.verifier` is needed, because `iterative_dpo.selection.score` is `verifier`")
    if rounds.selection.score == "verifier" and evaluation:
        evaluation.check_verifier(rounds.prompts, "iterative_dpo.prompts")


METHOD = Method(
    IterativeDpoRecipe,
    composition="flows.iterative_dpo:iterative_dpo",
    decides={
        "rounds/prompts": "iterative_dpo.prompts",
        r"round-\d+/score": "evaluation",
        r"round-\d+/generate:prompts": "iterative_dpo.prompts_per_round",
        r"round-\d+/generate:first_prompt": "the first prompt",
        r"round-\d+/(generate|select|dpo)": "iterative_dpo",
    },
)
