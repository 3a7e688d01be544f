"""The method ``iterative-dpo``: rounds of generate, score, select, train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, reward_model, rewards
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import Input, Step
from alignment_core.composition.results import Outputs
from alignment_core.composition.steps import Rewards
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class IterativeDpoRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, select, train → evaluation → promotion."""

    SAMPLES: ClassVar[bool] = True
    method: Literal["iterative-dpo"] = "iterative-dpo"
    """Iterative DPO."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model; may be left out if `iterative_dpo.rewards` or `iterative_dpo.selection` name something else."""
    iterative_dpo: IterativeDpoConfig
    """The rounds."""

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


def compose(recipe: IterativeDpoRecipe) -> Outputs:
    """Compose the whole recipe. Stages start as soon as their inputs are there."""
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe.reward_model, base, start)

    section = recipe.iterative_dpo
    prompts = steps.dataset("rounds/prompts", section.prompts, "prompts", base)
    policies, samples = rounds(recipe, section, start, prompts, judge)

    evaluations = Evaluations(recipe, base, judge)
    labels = ["sft" if recipe.sft else "start", *(f"round-{number}" for number in range(1, section.rounds + 1))]
    for label, policy, sampled in zip(labels, policies, [*samples, None], strict=True):
        evaluations.add(label, policy, after=sampled)  # the rounds have the machines first

    return Outputs(
        policy=policies[-1],
        reward_model=judge,
        report=evaluations.report(),
        final=f"round-{section.rounds}",
        baseline=evaluations.baseline[0] if evaluations.baseline else None,
        evaluations=evaluations,
    )


def rounds(
    recipe: BaseRecipe,
    section: IterativeDpoConfig,
    start: Input,
    prompts: Input,
    judge: Input | None,
    rounds_before: int = 0,
) -> tuple[list[Input], list[Step]]:
    """All rounds: the start and the policy of each round, and the samples of each round.

    Prompts and noise continue after ``rounds_before`` other rounds.
    """
    policies, samples = [start], list[Step]()
    ranked_by = rewards("iterative_dpo.rewards", section.rewards, judge, "rounds")
    for number in range(1, section.rounds + 1):
        reference = start if section.reference == "initial" and number > 1 else None
        round_number = rounds_before + number
        sampled, policy = one_round(
            recipe, section, f"round-{number}", round_number, policies[-1], prompts, ranked_by, reference
        )
        policies.append(policy)
        samples.append(sampled)
    return policies, samples


def one_round(
    recipe: BaseRecipe,
    section: IterativeDpoConfig,
    label: str,
    round_number: int,
    policy: Input,
    prompts: Input,
    ranked_by: Rewards,
    reference: Input | None,
) -> tuple[Step, Step]:
    """Generate → score → select → train; returns the samples and the next policy.

    ``round_number`` counts from 1, and goes on from night to night.
    """
    count = section.prompts_per_round
    first, stream = (round_number - 1) * count, f"round-{round_number}"
    verifying = recipe.evaluation if section.selection.score == "verifier" else None
    samples = steps.generate(f"{label}/generate", section.generation, policy, prompts, first, count, stream)
    scores = steps.score(f"{label}/score", samples, policy, ranked_by, verifying)
    pairs = steps.select_pairs(f"{label}/select", section.selection, samples, scores, stream)
    return samples, steps.dpo(f"{label}/dpo", section.training, section.loss, policy, pairs, reference, stream)


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from pairs by a reward model, or from prompts with an answer that a verifier compares with."""
    return sections.rounds(profile, "iterative-dpo", (5e-7, 2e-4), {})


METHOD = Method(
    IterativeDpoRecipe,
    compose,
    decides={
        "rounds/prompts": "iterative_dpo.prompts",
        r"rounds/reward-\d+:.*": "iterative_dpo.rewards",
        r"round-\d+/score:rewards.*": "iterative_dpo.rewards",
        r"round-\d+/score": "evaluation",
        r"round-\d+/generate:prompts": "iterative_dpo.prompts_per_round",
        r"round-\d+/generate:first_prompt": "the first prompt",
        r"round-\d+/reference-logps:order": "the order of the rows",
        r"round-\d+/reference-logps:ld_alpha": "iterative_dpo.loss.ld_alpha",
        r"round-\d+/reference-logps": "iterative_dpo.training",
        r"round-\d+/(generate|select|dpo)": "iterative_dpo",
    },
    init=Init(
        kinds=("preferences", "prompts"), sections=init_sections, why="prompts, and what says which answers are better"
    ),
)
