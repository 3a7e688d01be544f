"""From the rewards of a run's completions to training: which of them are trained on, and the total reward of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alignment_core.errors import DataError
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rewards.aggregation import (
    RunningMean,
    informative_groups,
    length_penalties,
    means_by_source,
    total_rewards,
)
from alignment_core.rewards.base import kind_of
from alignment_core.rewards.results import MissingRewards, RewardResult, RewardValue, extras, numbers, reasons, scores
from alignment_core.rollout.advantages import Samples
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.sync_sampler import SyncSampler
from alignment_core.stages.rl.names import FIELD

Ask = Callable[[Samples], list[list[RewardResult]]]
"""Rows of completions → for each source the result of each row."""
REFILLS = 3
"""How often a step samples further prompts if no completion has a reward."""


class Rewarding:
    """Asks for rewards, and remembers what normalising them takes over a run."""

    def __init__(self, section: RlConfig, sources: Ask, watch: Stopwatch, cost: dict[str, float]) -> None:
        """Failures add up in ``cost``, time in ``watch``."""
        self.section, self.sources, self.watch, self.cost = section, sources, watch, cost
        self.running = [RunningMean() for _ in section.rewards]
        self.missing = MissingRewards(len(section.rewards))

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on needs to know; plain numbers."""
        return {"running": [one.state for one in self.running], "missing": self.missing.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a run was."""
        self.running = [RunningMean(one) for one in state["running"]]
        self.missing = MissingRewards(len(self.running), state["missing"])

    def warnings(self) -> list[str]:
        """How many completions of all steps lack some rewards, or all of them."""
        return self.missing.warnings([kind_of(one).who(one) for one in self.section.rewards], FIELD)

    def of(self, samples: Samples) -> Samples:
        """The samples with what each source gives or why it gives nothing, and whether they are trained on."""
        section = self.section
        with self.watch.part("reward"):
            given = list(zip(*self.sources(samples), strict=True))
        samples = [
            {
                **row,
                "rewards": numbers(one),
                "scores": scores(one),
                "extra": extras(one),
                "failures": reasons(one),
                **self._steps(one),
            }
            for row, one in zip(samples, given, strict=True)
        ]
        kept = [row for row in samples if row["failures"] is None]
        self.cost["failed_rewards"] = self.cost.get("failed_rewards", 0.0) + len(samples) - len(kept)
        teaches = {row["group"] for row in kept}
        if section.filter and kept:
            raw_SR = np.array([row["scores"] for row in kept], float)
            groups_S = np.array([row["group"] for row in kept])
            teaches = informative_groups(raw_SR, groups_S, section.rewards, section.filter)
        return [{**row, "used": row["failures"] is None and row["group"] in teaches} for row in samples]

    def _steps(self, given: Sequence[RewardResult]) -> dict[str, Any]:
        """What of a completion's rewards is given step by step, if anything is: the token of each, and its weighted reward; and
        what stands for them in the completion's one reward."""
        found = [
            (one, config.weight)
            for one, config in zip(given, self.section.rewards, strict=True)
            if config.by_step and isinstance(one, RewardValue)
        ]
        steps = [(place, weight * reward) for one, weight in found for place, reward in one.steps]
        return {"steps": steps, "in_steps": sum(weight * one for one, weight in found)} if found else {}

    def experience(self, sampler: SyncSampler | AsyncSampler, step: int) -> tuple[Samples, dict[str, float]]:
        """Rewarded completions of as many prompts as a step takes, those that are trained on first; and what came of them.

        With dynamic filtering, prompts that teach nothing are kept with ``used`` false, and further ones are sampled for; as
        they are, without it, if no completion has a reward. Raises DataError if nothing comes of that.
        """
        section, used, attempts = self.section, 0, 0
        samples: Samples = []
        most = section.filter.max_refills if section.filter else 0
        while used < section.prompts_per_step and attempts <= (most if _rewarded(samples) else max(most, REFILLS)):
            with self.watch.part("generate"):
                samples += sampler.take(section.prompts_per_step - used)
            used = len({row["group"] for row in samples if row["used"]})
            attempts += 1
        self.missing.add([row["rewards"] for row in samples], [row["failures"] for row in samples])
        given_SR = np.array([row["rewards"] for row in _rewarded(samples)], float)
        if not len(given_SR):
            raise DataError(
                f"step {step}: no completion has a reward, of {len({row['group'] for row in samples})} prompts that were "
                "sampled; at least one of rl.rewards has to return a number for the completions of each prompt"
            )
        if not used:
            raise DataError(
                f"step {step}: rl.filter drops all {len({row['group'] for row in samples})} prompts, as the completions "
                "of each have equal rewards, or a mean outside rl.filter.low and .high; the task is too easy or too hard for "
                "the policy, or the bounds do not fit the rewards"
            )
        groups = len({row["group"] for row in samples})
        chosen = sorted(samples, key=lambda row: not row["used"])  # stable
        rewarded = [row for row in chosen if row["used"]]
        self.total(rewarded)
        means = {f"reward_{number}": mean for number, mean in means_by_source(given_SR).items()}
        shown = {name for row in samples for name in row["extra"]}
        for name in sorted(shown):
            means[f"extra_{name}"] = float(np.mean([row["extra"][name] for row in samples if name in row["extra"]]))
        stale_K = step - np.concatenate([row["versions"][row["mask"]] for row in rewarded])
        return chosen, {**means, "prompts_used": used / groups, "staleness": float(stale_K.mean())}

    def total(self, rows: Samples) -> None:
        """Put the one reward of each row, from those of all sources and its length, into it."""
        raw_SR = np.array([row["rewards"] for row in rows], float)
        groups_S = np.array([row["group"] for row in rows])
        total_S = total_rewards(raw_SR, groups_S, self.section.rewards, self.running)
        left_S = np.array([row["tokens_left"] for row in rows])
        truncated_S = (left_S == 0) & np.array([row["finish_reason"] != "stop" for row in rows])
        longest = self.section.generation.max_completion_length
        total_S = total_S + length_penalties(longest - left_S, truncated_S, longest, self.section.shaping)
        for row, reward in zip(rows, total_S, strict=True):
            row["reward"] = float(reward)


def _rewarded(samples: Samples) -> Samples:
    return [row for row in samples if row["failures"] is None]
