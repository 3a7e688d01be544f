"""The method ``iterative-dpo``: rounds of generate, score, select, train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rewards import RewardConfig
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


class Rounds(Protocol):
    """A section of rounds that sample, score and train."""

    @property
    def rewards(self) -> Sequence[RewardConfig]: ...
    @property
    def selection(self) -> Any: ...
    @property
    def prompts(self) -> DataConfig: ...


def check_rounds(
    recipe: BaseRecipe, reward_model: RewardModelConfig | None, rounds: Rounds | None, field: str = "iterative_dpo"
) -> None:
    """Raise ValueError unless there is something that ranks the completions of the recipe's rounds, its section ``field``."""
    if reward_model:
        reward_model.check_origin()
    if rounds is None:
        recipe.check_used((), "evaluation.rewards")
        return
    recipe.check_ours(rounds.rewards, f"{field}.rewards")
    if rounds.rewards:
        recipe.check_used(rounds.rewards, f"{field}.rewards")
    evaluation, by_verifier = recipe.evaluation, rounds.selection.score == "verifier"
    if not rounds.rewards and reward_model is None and not by_verifier:
        raise ValueError(
            f"`reward_model` is needed, because `{field}.selection.score` is `reward`: add it, or list `{field}.rewards`"
        )
    if by_verifier and not (evaluation and evaluation.verifier):
        raise ValueError(f"`evaluation.verifier` is needed, because `{field}.selection.score` is `verifier`")
    if by_verifier and evaluation:
        evaluation.check_verifier(rounds.prompts, f"{field}.prompts")


METHOD = Method(
    IterativeDpoRecipe,
    composition="alignment.flows.iterative_dpo:iterative_dpo",
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
