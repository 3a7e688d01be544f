"""SFT → reward model → rounds of generate, score, select, train → evaluation."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start, reward_model, rewards
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, rollout, training
from alignment.tasks.graph import Input, Step
from alignment.tasks.rollout import Rewards
from alignment_core.recipes import BaseRecipe, IterativeDpoConfig
from alignment_core.recipes.methods.iterative_dpo import IterativeDpoRecipe


def iterative_dpo(recipe: IterativeDpoRecipe) -> Outputs:
    """Compose the whole recipe. Stages start as soon as their inputs are there."""
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe, recipe.reward_model, base, start)

    section = recipe.iterative_dpo
    prompts = data.dataset("rounds/prompts", section.prompts, "prompts", base)
    policies, samples = rounds(recipe, section, start, prompts, judge)

    evaluations = Evaluations(recipe, base, judge)
    labels = ["sft" if recipe.sft else "start", *(f"round-{number}" for number in range(1, section.rounds + 1))]
    for label, one, sampled in zip(
        labels, policies, [*samples, None], strict=True
    ):  # the rounds have the machines first
        evaluations.add(label, one, after=sampled)

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
    """All rounds: the start and the policy that each ends with, and what each samples from the policy before it.

    Prompts and noise continue after ``rounds_before`` others.
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
    """Generate → score → select → train; returns the samples and the next policy. ``round_number`` counts all rounds ever,
    from 1."""
    count = section.prompts_per_round
    first, stream = (round_number - 1) * count, f"round-{round_number}"
    verifying = recipe.evaluation if section.selection.score == "verifier" else None
    samples = rollout.generate(f"{label}/generate", section.generation, policy, prompts, first, count, stream)
    scores = rollout.score(f"{label}/score", samples, policy, ranked_by, verifying)
    pairs = rollout.select_pairs(f"{label}/select", section.selection, samples, scores, stream)
    return samples, training.dpo(f"{label}/dpo", section.training, section.loss, policy, pairs, reference, stream)
