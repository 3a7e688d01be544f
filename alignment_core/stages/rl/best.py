"""The best policy of a reinforcement-learning run so far, by the reward of its completions of held-out prompts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.errors import NumericError
from alignment_core.execution.base import StageContext
from alignment_core.recipes.sections.rl import BestConfig, RlConfig
from alignment_core.rewards.aggregation import rewards_as_given
from alignment_core.rewards.results import numbers, reasons
from alignment_core.rollout.advantages import Samples
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.sampling import Sampling
from alignment_core.stages.rl.reward_step import Ask
from alignment_core.training.checkpoints import link_tree, put_in_place


class Best:
    """Looks at the policy now and then, and keeps the best as a folder of the progress that is whole or absent.

    ``state`` says which one it is; it belongs into the progress checkpoints. A folder goes only when neither it nor the
    newest checkpoint names it, so that a run that is killed finds the one that it goes on with.
    """

    def __init__(self, context: StageContext, section: RlConfig, config: BestConfig, prompts: Sequence[Any]) -> None:
        self.context, self.section, self.config = context, section, config
        self.draws = PromptSchedule(prompts, section.generation, context.derive("best"), "best/")
        self.state: dict[str, Any] | None = None
        """Its step and reward."""
        self.looked = 0
        """The last step that it looked at; this, too, belongs into the checkpoints."""
        self.named: dict[str, Any] | None = None
        """The state in the newest checkpoint."""

    def resume(self, state: dict[str, Any] | None, looked: int = 0) -> None:
        """Go on from what a checkpoint says, none at the start of a run."""
        self.state, self.looked = state, looked
        self.checkpointed()

    def checkpointed(self) -> None:
        """The newest checkpoint holds the state."""
        self.named = self.state
        self._drop_others()

    def is_due(self, step: int) -> bool:
        """Whether to look at the policy after so many steps."""
        return step > self.looked and (step % self.config.eval_steps == 0 or step == self.section.steps)

    def look(self, step: int, sampling: Sampling, sources: Ask, export: Callable[[Path], None]) -> dict[str, float]:
        """The metric of the policy after so many steps, which the engines hold; the policy stays if it is the best."""
        reward = self._reward(
            replace(sampling, draws=self.draws).complete(range(len(self.draws.prompts)), step), sources
        )
        if self.state is None or reward > self.state["reward"]:
            self.keep(step, reward, export)
        self.looked = step
        return {"held_out_reward": reward}

    def keep(self, step: int, reward: float, export: Callable[[Path], None]) -> None:
        """Make the policy after so many steps the best; the one before it goes later."""
        partial = self._folder(step).with_suffix(".partial")
        export(partial)
        put_in_place(partial, self._folder(step))
        self.state = {"step": step, "reward": reward}
        self._drop_others()

    def link_to(self, folder: Path) -> dict[str, float]:
        """Make the best an output; metrics that say which it is."""
        assert self.state is not None, "the last step is looked at"
        link_tree(self._folder(self.state["step"]), folder)
        return {"best_step": self.state["step"], "best_held_out_reward": self.state["reward"]}

    def _folder(self, step: int) -> Path:
        return self.context.progress / f"best-{step:08d}"

    def _drop_others(self) -> None:
        kept = {self._folder(state["step"]) for state in (self.state, self.named) if state}
        for folder in set(self.context.progress.glob("best-*")) - kept:
            shutil.rmtree(folder)

    def _reward(self, rows: Samples, sources: Ask) -> float:
        """Mean reward of the completions of all held-out prompts; the same seeds each time, to compare with less noise."""
        given = [numbers(one) for one in zip(*sources(rows), strict=True) if reasons(one) is None]
        if not given:
            raise NumericError(f"none of the {len(rows)} completions of rl.best.prompts has a reward")
        tokens = sum(len(row["completion_ids"]) for row in rows)
        for name, value in {"failed_rewards": len(rows) - len(given), "completion_tokens": tokens}.items():
            self.context.cost[name] = self.context.cost.get(name, 0) + value
        return float(rewards_as_given(np.array(given, float), self.section.rewards).mean())
