"""The loop of a run: sample and reward, compute advantages, update the policy, and give the engines its new weights.

:meth:`Loop.run` is the loop, and :meth:`Loop._step` a step of it; :mod:`alignment_core.stages.rl.run` opens what they use.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from alignment_core.artifacts.reference import MASTERS
from alignment_core.errors import NumericError, OutOfMemory, Stopped
from alignment_core.execution.base import StageContext
from alignment_core.execution.intermediate_checkpoints import IntermediateCheckpoints
from alignment_core.execution.metric_window import MetricWindow
from alignment_core.execution.save_schedule import SaveSchedule
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.losses.kl import adapted_coefficient
from alignment_core.models.masters import name_masters
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rollout.advantages import ValueScale, add_advantages, reasoning_step_rewards
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.rollout import Rollout, to_batch
from alignment_core.rollout.sampling import Sampling, SyncSampler
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.stages.rl.best import Best
from alignment_core.stages.rl.rewards import Rewards
from alignment_core.stages.rl.weights import WeightSync
from alignment_core.training.checkpoints import curve_of, drop_older
from alignment_core.training.policy_groups import PolicyGroups
from alignment_core.training.resumable import resume, save_progress
from alignment_core.training.step_data import StepData

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """The steps of one run, from the last checkpoint. Everything that it uses is open until it is done."""

    context: StageContext
    section: RlConfig
    ranks: PolicyGroups
    weights: WeightSync
    sampling: Sampling
    sampler: SyncSampler | AsyncSampler
    rewards: Rewards
    best: Best | None
    trajectories: Trajectories
    watch: Stopwatch
    shows: Container[str]
    """The stage's key metrics."""
    kl_coefficient: float = field(init=False)
    values: ValueScale = field(init=False)
    schedule: SaveSchedule = field(init=False)
    window: MetricWindow = field(init=False)

    def __post_init__(self) -> None:
        section = self.section
        normalises = section.critic is not None and section.critic.normalise
        self.values = ValueScale(normalises, outputs_values=self.rewards.of_critic is not None)
        self.kl_coefficient = section.kl.coefficient

    def run(self) -> dict[str, Any]:
        """All remaining steps, then the models; metrics."""
        context = self.context
        section = self.section
        state = resume(self.ranks.groups, context.progress)
        step = state["step"]
        self.schedule = SaveSchedule(context)
        metrics: dict[str, Any] = {}
        if step > 0:
            self._restore(state["driver"])
            context.resume_curve(curve_of(context.progress, step), step)
            metrics = context.curve.metrics_after(step)
        self.window = MetricWindow(context.progress, step, section.steps)
        rewards_differ = step > 0
        if self.best:
            self.best.resume(state["driver"].get("best"), state["driver"].get("evaluated", 0))
        checkpoints = IntermediateCheckpoints(context.progress, section.training, step, section.steps)
        self._keep_if_due(checkpoints, step)
        metrics |= self._sync_weights(step, self._evaluates(step))
        context.report(step, section.steps, "steps", **metrics)
        while step < section.steps:
            with self._saved_if_stopped(step):
                metrics = self._step(step)
            step += 1
            rewards_differ |= metrics.get("reward_deviation", 0.0) > 0
            self.window.add(
                step, {name: metrics[name] for name in metrics if name in self.shows or name.startswith("reward")}
            )
            context.curve.add(step, "steps", metrics)  # before the checkpoints, which hold the curve
            # All that needs the trainers comes before the engines, while which sample they may rest.
            if (step < section.steps and self.schedule.is_due) or context.stopping.is_set():
                self._save(step, self._state())
            self._keep_if_due(checkpoints, step)
            evaluates = self._evaluates(step)
            if step < section.steps or evaluates:
                with self._saved_if_stopped(step):
                    metrics |= self._sync_weights(step, evaluates)
            context.curve.add(step, "steps", metrics)
            with self._saved_if_stopped(step):  # while engines took the weights
                context.report(step, section.steps, "steps", **metrics)
        if self.ranks.rests:  # after an evaluation
            self._wake_trainers()
        self.sampler.close()
        self._export()
        checkpoints.link(context, context.model("policy"))
        self.trajectories.settle()
        if warnings := self._warnings(rewards_differ):
            metrics["warnings"] = warnings
        return {**metrics, **self.window.metrics(), "steps": section.steps, "parameters": state["parameters"]}

    def _step(self, step: int) -> dict[str, float]:
        """One step, including the update of the policy; metrics."""
        section = self.section
        rollouts, metrics = self.rewards.next_batch(self.sampler, step)
        with self.watch.part("transfer"):
            self._wake_trainers()
        used = [rollout for rollout in rollouts if rollout.used]
        if all(rollout.masked for rollout in used):
            return metrics | self._skip(step, rollouts)
        batch = to_batch(used)
        self._forward(batch, step)
        totals = [rollout.reward for rollout in used if rollout.reward is not None]
        reasoning_steps = reasoning_step_rewards(used, section.rewards)
        metrics |= add_advantages(batch, totals, section.advantage, section.kl, self.kl_coefficient, reasoning_steps)
        if self.trajectories.keeps(step):
            self.trajectories.write(step, rollouts, batch)
        else:
            self.trajectories.drop(step)
        metrics |= self._update(batch, step, rollouts)
        if section.kl.target is not None and self._trains_policy(step):
            metrics["kl_coefficient"] = self.kl_coefficient
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, metrics["kl"], section.kl.target, len(used), section.kl.horizon
            )
        return metrics | self._lengths(rollouts)

    def _wake_trainers(self) -> None:
        """Free the GPUs that the engines share with the trainers, and let these have their memory back."""
        self.sampler.release()
        self.ranks.wake()

    def _skip(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """A step without completions to train on; metrics."""
        log.warning("step %d has no completion to train on, because of rl.filter or mask_truncated_completions", step)
        if self.trajectories.keeps(step):
            self.trajectories.write(step, [replace(rollout, used=False) for rollout in rollouts], None)
        else:
            self.trajectories.drop(step)
        self.ranks.end_step()
        return self._lengths(rollouts)

    def _forward(self, batch: StepData, step: int) -> None:
        """Give the ranks the batch, and add the numbers of forward passes that are needed here to it."""
        section = self.section
        old = section.needs_old_logps(len(batch.ends_S))
        with self.watch.part("transfer"):
            self.ranks.load(batch, self.rewards.critic_units)
        if old or section.critic or section.kl.coefficient > 0:
            with self.watch.part("logps"):
                needed = self._columns_needed(step, old)
                batch.numbers.update(self.ranks.forward(old, needed))
        if section.critic:
            batch.numbers["old_values"] = self.values.values_of(batch.numbers["old_values"])

    def _columns_needed(self, step: int, old: bool) -> list[str]:
        """The results of forward passes that are needed here: for rewards and advantages, or for the trajectories."""
        section = self.section
        kept = self.trajectories.keeps(step)
        in_reward = section.kl.place == "reward" and section.kl.coefficient > 0
        needed = {
            "old_logps": old and (kept or in_reward),
            "reference_logps": section.kl.coefficient > 0 and (kept or in_reward),
            "old_values": section.critic is not None,
        }
        return [name for name, is_needed in needed.items() if is_needed]

    def _update(self, batch: StepData, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The optimiser steps on a batch with advantages; metrics. After a NumericError the rows of the step are kept."""
        numbers = {"advantages": batch.numbers["advantages"]}
        if "returns" in batch.numbers:
            numbers["returns"] = self.values.targets_of(batch.numbers["returns"])
        with self.watch.part("train"):
            try:
                metrics = self.ranks.update(numbers, self.kl_coefficient, self.values.of_loss)
                self._check_mismatch(step, metrics.get("mismatch", 0.0))
            except NumericError:
                if not self.trajectories.keeps(step):
                    self.trajectories.write(step, rollouts, batch)
                self.trajectories.settle()
                raise
        return metrics

    def _check_mismatch(self, step: int, difference: float) -> None:
        """Raise NumericError if the sampling policy differs from the trained one by too many nats per token."""
        bound = self.section.importance_sampling_correction.stop_above
        if difference <= bound:
            return
        ahead = self.section.execution.max_staleness
        why = f"it moves too far in {ahead} steps (rl.execution)" if ahead else "the engine does not hold the policy"
        raise NumericError(
            f"step {step}: the policy that sampled and the one that is trained differ by {difference:.3g} nats per token, "
            f"above rl.importance_sampling_correction.stop_above {bound:g}: {why}"
        )

    def _trains_policy(self, step: int) -> bool:
        return self.section.critic is None or step >= self.section.critic.freezing_steps

    def _lengths(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of the completions' lengths, which are also part of the stage's cost."""
        tokens = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
        truncated = sum(rollout.truncated for rollout in rollouts)
        for name, value in {"completion_tokens": tokens, "steps": 1}.items():
            self.context.cost[name] = self.context.cost.get(name, 0.0) + value
        return {"completion_length": tokens / len(rollouts), "truncated": truncated / len(rollouts)}

    def _evaluates(self, step: int) -> bool:
        """Whether the policy is evaluated after so many steps."""
        return self.best is not None and self.best.is_due(step)

    def _sync_weights(self, step: int, evaluates: bool) -> dict[str, float]:
        """Give the engines the weights after so many steps, and evaluate these if asked; metrics."""
        with self.sampler.paused(step, empty=evaluates):
            with self.watch.part("transfer"):
                self.weights.send(step)
            if not evaluates or self.best is None:
                return {}
            with self.watch.part("best"):
                return self.best.evaluate(step, self.sampling, self.rewards.sources, partial(self._export_best, step))

    def _export_best(self, step: int, folder: Path) -> None:
        """Write the policy after so many steps, which the engines sample with before and after."""
        if self.ranks.rests:
            self._wake_trainers()
        self.ranks.export("policy", folder)
        if self.ranks.rests and step < self.section.steps:
            self.weights.send(step)

    def _keep_if_due(self, checkpoints: IntermediateCheckpoints, step: int) -> None:
        """Keep the policy after so many steps as an output, if it is due."""
        if checkpoints.is_due(step):
            checkpoints.add(step, partial(self.ranks.export, "policy"))

    def _state(self) -> dict[str, Any]:
        """Plain data for a checkpoint, beside the trainers' own."""
        state: dict[str, Any] = {
            "sampler": self.sampler.state,
            "rewards": self.rewards.state,
            "kl_coefficient": self.kl_coefficient,
            "returns": self.values.state,
        }
        if not state["sampler"]["pending"]:  # pending draws are rewarded again: their failures would count twice
            state["failures"] = self.rewards.sources.recent
        if self.best:
            state |= {"best": self.best.state, "evaluated": self.best.evaluated}
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`_state` returned."""
        self.sampler.restore(state["sampler"])
        self.rewards.restore(state["rewards"])
        if "failures" in state:
            self.rewards.sources.restore(state["failures"])
        self.kl_coefficient = state["kl_coefficient"]
        self.values.restore(state["returns"])

    @contextmanager
    def _saved_if_stopped(self, step: int) -> Iterator[None]:
        """If the block is stopped, save the state from before it: the trainers, which are stopped first, are still there."""
        state = self._state()
        try:
            yield
        except Stopped:
            try:
                self.ranks.wake()  # beside the engines: a stop does not wait for their calls in progress
            except OutOfMemory:
                self._wake_trainers()
            self._save(step, state)
            raise

    def _save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, then delete the older ones."""
        with self.schedule.saving():
            self.trajectories.settle()
            self.window.save()
            curve = self.context.curve.to_bytes()
            is_new = save_progress(self.ranks.groups, self.context.progress, curve, driver=state)
            drop_older(self.context.progress, step)
            # A run that resumes in an evaluation may find a better policy than its checkpoint goes on to name.
            if self.best and is_new:
                self.best.checkpointed()

    def _export(self) -> None:
        """Write the models that the recipe asks for."""
        outputs = self.context.outputs
        masters = outputs[MASTERS] if self.section.training.saves_masters else None
        self.ranks.export("policy", outputs["policy"], outputs[ADAPTER], masters)
        if masters:
            name_masters(outputs["policy"], masters)
        if self.section.critic:
            self.ranks.export("critic", self.context.outputs["critic"])
        if self.section.ema:
            self.ranks.export("average", self.context.outputs["average"])

    def _warnings(self, rewards_differ: bool) -> list[str]:
        """Sentences for the run's report. ``rewards_differ``: whether the rewards of any step did."""
        equal = "in every step all completions had equal rewards: nothing can be learnt from rl.rewards"
        return [*([] if rewards_differ else [equal]), *self.rewards.warnings()]
