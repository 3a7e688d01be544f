"""The rewards of a run's completions: which completions are trained on, the total reward of each, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alignment_core.data.turn_end import TurnEnd
from alignment_core.errors import DataError
from alignment_core.execution.base import StageContext
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.recipes.sections.rewards import RewardConfig, reward_names
from alignment_core.recipes.sections.rl import REWARDS_FIELD, RlConfig
from alignment_core.rewards.aggregation import (
    RunningMean,
    informative_groups,
    length_penalties,
    score_units,
    total_rewards,
)
from alignment_core.rewards.base import Opening, kind_of
from alignment_core.rewards.results import MissingRewards, extras, numbers, scores
from alignment_core.rewards.scoring_actors import in_actors
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.sampling import SyncSampler

REFILLS = 3
"""Times that a step samples further prompts if no completion has a reward."""


def open_sources(
    context: StageContext,
    section: RlConfig,
    tokenizer: Any,
    chat_template: str | None,
    turn_end: TurnEnd,
    prompts: list[dict[str, Any]],
    warnings: list[str],
) -> RewardSources:
    """The sources of the rewards. They add to ``warnings`` once they are open."""
    reward_model_names = [f"reward-{number}" for number, reward in enumerate(section.rewards) if kind_of(reward).actors]
    opening = Opening(
        REWARDS_FIELD,
        context.resources,
        tokenizer=tokenizer,
        turn_end=turn_end,
        chat_template=chat_template,
        policy=context.references["policy"].short,
        prompts=prompts,
        images_in_observations=section.environment is not None and section.environment.images,
        warnings=warnings,
        elsewhere=context.machines.actors.elsewhere,
        scores=in_actors(context.machines.actors, reward_model_names, context.resources),
        starting=context.ticket.starting,
    )
    models = {
        number: context.model(f"reward-{number}") for number, reward in enumerate(section.rewards) if reward.model
    }
    return RewardSources(
        section.rewards, opening, models, section.prompts_per_step * section.generation.num_generations
    )


class Rewards:
    """Rewards completions, and keeps the running statistics that normalisation needs over a run."""

    def __init__(
        self,
        section: RlConfig,
        sources: RewardSources,
        watch: Stopwatch,
        cost: dict[str, float],
        of_critic: tuple[int, tuple[float, float]] | None = None,
    ) -> None:
        """Failures are counted in ``cost``, time in ``watch``. ``of_critic``: the number of the reward whose model the critic
        is initialised from, and the mean and deviation of its scores."""
        self.section = section
        self.sources = sources
        self.watch = watch
        self.cost = cost
        self.names = reward_names(section.rewards)
        self.running = [RunningMean() for _ in section.rewards]
        self.missing = MissingRewards(len(section.rewards))
        self.of_critic = of_critic
        self.trained_steps, self.skipped_steps = 0, 0
        """Steps so far with completions to train on, and without."""

    @property
    def critic_units(self) -> tuple[float, float]:
        """The output of the critic that is a value of 0, and the difference of outputs that is a value of 1."""
        if self.of_critic is None:
            return 0.0, 1.0
        number, spread = self.of_critic
        return score_units(self.section.rewards[number], self.running[number], spread)

    @property
    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {
            "running": [running.state for running in self.running],
            "missing": self.missing.state,
            "trained_steps": self.trained_steps,
            "skipped_steps": self.skipped_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.running = [RunningMean(running) for running in state["running"]]
        self.missing = MissingRewards(len(self.running), state["missing"])
        self.trained_steps, self.skipped_steps = state["trained_steps"], state["skipped_steps"]

    def warnings(self) -> list[str]:
        """Sentences about completions of all steps that lack some rewards, or all of them, and about skipped steps."""
        warnings = self.missing.warnings(
            [kind_of(reward).description(reward) for reward in self.section.rewards], REWARDS_FIELD
        )
        if self.skipped_steps:
            warnings.append(
                f"{self.skipped_steps} of {self.skipped_steps + self.trained_steps} steps changed nothing, because rl.filter "
                "or rl.loss.mask_truncated_completions left no completion to train on; take fewer steps, or more prompts a step"
            )
        return warnings

    def add_rewards(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The completions with the result of each reward, and whether they are trained on."""
        with self.watch.part("reward"):
            results = zip(*self.sources([rollout.row() for rollout in rollouts]), strict=True)
        rollouts = [
            replace(rollout, rewards=dict(zip(self.names, of_rollout, strict=True)))
            for rollout, of_rollout in zip(rollouts, results, strict=True)
        ]
        rewarded = _rewarded(rollouts)
        self.cost["failed_rewards"] = self.cost.get("failed_rewards", 0.0) + len(rollouts) - len(rewarded)
        informative = {rollout.group for rollout in rewarded}
        if self.section.filter and rewarded:
            raw_SR = np.array([scores(list(rollout.rewards.values())) for rollout in rewarded], float)
            groups_S = np.array([rollout.group for rollout in rewarded])
            informative = informative_groups(raw_SR, groups_S, self.section.rewards, self.section.filter)
        return [
            replace(rollout, used=rollout.failures is None and rollout.group in informative) for rollout in rollouts
        ]

    def next_batch(self, sampler: SyncSampler | AsyncSampler, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Rewarded completions of as many prompts as a step takes, those that are trained on first; and metrics.

        With dynamic filtering, prompts that are not informative are kept with ``used`` false, and further ones are sampled;
        the same happens without it if no completion has a reward. The sampler calls ``add_rewards`` itself.

        A step may have no completion to train on: of a task that the policy has learned, say, all prompts have equal rewards.
        Raises DataError if that is so before any step has trained, or if no completion has a reward.
        """
        section = self.section
        rollouts: list[Rollout] = []
        used_prompts, attempts = 0, 0
        most = section.filter.max_refills if section.filter else 0
        while used_prompts < section.prompts_per_step and attempts <= (
            most if _rewarded(rollouts) else max(most, REFILLS)
        ):
            with self.watch.part("generate"):
                rollouts += sampler.next_batch(section.prompts_per_step - used_prompts)
            used_prompts = len({rollout.group for rollout in rollouts if rollout.used})
            attempts += 1
        self.missing.add(
            [numbers(list(rollout.rewards.values())) for rollout in rollouts],
            [rollout.failures for rollout in rollouts],
        )
        prompts = len({rollout.group for rollout in rollouts})
        if not _rewarded(rollouts):
            raise DataError(
                f"step {step}: no completion has a reward, of {prompts} prompts that were sampled; at least one of "
                "rl.rewards has to return a number for the completions of each prompt"
            )
        used = self.add_totals([rollout for rollout in rollouts if rollout.used]) if used_prompts else []
        is_skipped = all(rollout.masked for rollout in used)
        if is_skipped and not self.trained_steps:
            raise DataError(f"step {step}: {_why_skipped(prompts, len(used))}")
        self.trained_steps += not is_skipped
        self.skipped_steps += is_skipped
        metrics = {
            **extra_metrics(rollouts),
            "prompts_used": 0.0 if is_skipped else used_prompts / prompts,
            **reward_metrics(rollouts, section.rewards),
        }
        if not is_skipped:
            versions_K = np.concatenate([rollout.versions[rollout.loss_mask] for rollout in used])
            metrics["staleness"] = float((step - versions_K).mean())
        return [*used, *(rollout for rollout in rollouts if not rollout.used)], metrics

    def add_totals(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The completions with their total reward, from all sources and their length."""
        raw_SR = np.array([numbers(list(rollout.rewards.values())) for rollout in rollouts], float)
        groups_S = np.array([rollout.group for rollout in rollouts])
        total_S = total_rewards(raw_SR, groups_S, self.section.rewards, self.running)
        left_S = np.array([rollout.tokens_left for rollout in rollouts])
        truncated_S = np.array([rollout.truncated for rollout in rollouts])
        longest = self.section.generation.max_completion_length
        total_S = total_S + length_penalties(longest - left_S, truncated_S, longest, self.section.shaping)
        masked_S = truncated_S & self.section.loss.mask_truncated_completions
        return [
            replace(rollout, reward=float(total), masked=bool(masked))
            for rollout, total, masked in zip(rollouts, total_S, masked_S, strict=True)
        ]


def _why_skipped(prompts: int, used: int) -> str:
    """Why a step has nothing to train on, with a cure."""
    if used:
        return (
            f"all {used} completions were truncated, so rl.loss.mask_truncated_completions leaves none to train on; raise "
            "rl.generation.max_completion_length"
        )
    return (
        f"rl.filter drops all {prompts} prompts, as the completions of each have equal rewards, or a mean outside "
        "rl.filter.low and .high; the task is too easy or too hard for the policy, or the bounds do not fit the rewards"
    )


def reward_metrics(rollouts: Sequence[Rollout], rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """``rewards/<name>/mean`` and ``/std`` (divisor n - 1, as in TRL) of each reward over the completions that have it, and
    ``reward/missing_share``, the share of completions without a reward. A single completion has no deviation."""
    metrics: dict[str, float] = {}
    for name in reward_names(rewards):
        values = [value for value in numbers([rollout.rewards[name] for rollout in rollouts]) if value is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        if len(values) > 1:
            metrics[f"rewards/{name}/std"] = float(np.std(values, ddof=1))
    metrics["reward/missing_share"] = sum(rollout.failures is not None for rollout in rollouts) / len(rollouts)
    return metrics


def extra_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """``extra_<name>``: the mean of each further number that rewards returned, over the completions that have it."""
    numbers_by_name = [extras(list(rollout.rewards.values())) for rollout in rollouts]
    names = sorted({name for extra in numbers_by_name for name in extra})
    return {
        f"extra_{name}": float(np.mean([extra[name] for extra in numbers_by_name if name in extra])) for name in names
    }


def _rewarded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.failures is None]
