"""The best checkpoint of a reinforcement-learning run, by the reward of its completions of held-out prompts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.errors import NumericError
from alignment_core.execution.base import StageContext
from alignment_core.recipes.sections.rl import BestPolicyConfig, RlConfig
from alignment_core.rewards.aggregation import rewards_as_given
from alignment_core.rewards.results import numbers, reasons
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.sampling import Sampling
from alignment_core.training.checkpoints import link_model, put_in_place


class Best:
    """Evaluates the policy at intervals, and keeps the best one as a folder of the progress that is complete or absent.

    Save ``state`` and ``evaluated`` in progress checkpoints. A folder is deleted only when neither ``state`` nor the newest
    checkpoint names it, so that a run that was killed finds the one that its checkpoint names.
    """

    def __init__(
        self, context: StageContext, section: RlConfig, config: BestPolicyConfig, prompts: Sequence[Any]
    ) -> None:
        self.context = context
        self.section = section
        self.config = config
        self.schedule = PromptSchedule(prompts, section.generation, context.derive("best"), "best/")
        self.state: dict[str, Any] | None = None
        """Step and reward of the best policy."""
        self.evaluated = 0
        """Number of the last step that was evaluated."""
        self.saved: dict[str, Any] | None = None
        """The state in the newest checkpoint."""

    def resume(self, state: dict[str, Any] | None, evaluated: int = 0) -> None:
        """Continue from a checkpoint, or start with None."""
        self.state = state
        self.evaluated = evaluated
        self.checkpointed()

    def checkpointed(self) -> None:
        """The newest checkpoint holds the current state."""
        self.saved = self.state
        self._drop_others()

    def is_due(self, step: int) -> bool:
        """Whether the policy after so many steps is to be evaluated."""
        return step > self.evaluated and (step % self.config.eval_steps == 0 or step == self.section.steps)

    def evaluate(
        self, step: int, sampling: Sampling, sources: RewardSources, export: Callable[[Path], None]
    ) -> dict[str, float]:
        """Evaluate the policy after so many steps, which the engines hold, and keep it if it is the best; metrics."""
        held_out = replace(sampling, schedule=self.schedule)
        reward = self._reward(held_out.complete(range(len(self.schedule.prompts)), step), sources)
        if self.state is None or reward > self.state["reward"]:
            self.keep(step, reward, export)
        self.evaluated = step
        return {"held_out_reward": reward}

    def keep(self, step: int, reward: float, export: Callable[[Path], None]) -> None:
        """Make the policy after so many steps the best one."""
        partial = self._folder(step).with_suffix(".partial")
        export(partial)
        put_in_place(partial, self._folder(step))
        self.state = {"step": step, "reward": reward}
        self._drop_others()

    def link_to(self, folder: Path) -> dict[str, float]:
        """Make the best policy an output; its step and reward as metrics."""
        assert self.state is not None, "the last step is evaluated"
        link_model(self._folder(self.state["step"]), folder, self.context.model("policy"))
        return {"best_step": self.state["step"], "best_held_out_reward": self.state["reward"]}

    def _folder(self, step: int) -> Path:
        return self.context.progress / f"best-{step:08d}"

    def _drop_others(self) -> None:
        kept = {self._folder(state["step"]) for state in (self.state, self.saved) if state}
        for folder in set(self.context.progress.glob("best-*")) - kept:
            shutil.rmtree(folder)

    def _reward(self, rollouts: Sequence[Rollout], sources: RewardSources) -> float:
        """Mean reward over all held-out prompts. Seeds are the same each time, so that differences have less noise."""
        results = zip(*sources([rollout.row() for rollout in rollouts]), strict=True)
        rewards_SR = [numbers(of_completion) for of_completion in results if reasons(of_completion) is None]
        if not rewards_SR:
            raise NumericError(f"none of the {len(rollouts)} completions of rl.best.prompts has a reward")
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        for name, value in {"failed_rewards": len(rollouts) - len(rewards_SR), "completion_tokens": tokens}.items():
            self.context.cost[name] = self.context.cost.get(name, 0) + value
        return float(rewards_as_given(np.array(rewards_SR, float), self.section.rewards).mean())
