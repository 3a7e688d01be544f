"""The driver of a run: its steps, one after the other, from the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alignment_core.environments.episode import version_of
from alignment_core.errors import NumericError, Stopped
from alignment_core.execution.base import StageContext
from alignment_core.execution.metric_window import MetricWindow, unmoved
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.inference.engine import Engine
from alignment_core.inference.engines import Engines
from alignment_core.losses.kl import adapted_coefficient
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.advantages import add_advantages, step_data, step_rewards
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.sampling import Sampling
from alignment_core.rollout.sync_sampler import SyncSampler
from alignment_core.stages.rl.best import Best
from alignment_core.stages.rl.names import AVERAGE, CRITIC, POLICY, SHOWS
from alignment_core.stages.rl.reward_metrics import reward_metrics
from alignment_core.stages.rl.reward_step import Rewarding
from alignment_core.stages.rl.trajectories import Trajectories
from alignment_core.stages.rl.values import ValueScale
from alignment_core.training.checkpoints import curve_of, drop_older
from alignment_core.training.learner import StepReport
from alignment_core.training.policy_ranks import PolicyRanks


@dataclass
class Driver:
    """One run. All that it works with is open, and stays so until it is done."""

    context: StageContext
    section: RlConfig
    engines: Engines
    trainers: PolicyRanks
    sampling: Sampling
    sampler: SyncSampler | AsyncSampler
    """Draws prompts and has them answered and rewarded."""
    rewarding: Rewarding
    sources: RewardSources
    best: Best | None
    trajectories: Trajectories
    watch: Stopwatch
    kl_coefficient: float = field(init=False)
    values: ValueScale = field(init=False)
    gives_adapters: bool = field(init=False)
    """Whether engines are given the policy's adapter, and not all of its weights."""
    engines_have_start: bool = field(init=False, default=False)
    """Whether the engines had the weights beside the adapter from this driver."""

    def __post_init__(self) -> None:
        self.values = ValueScale(self.section.critic is not None and self.section.critic.normalise)
        self.kl_coefficient = self.section.kl.coefficient
        lora, most = self.section.training.lora, self.context.resources.max_lora_rank
        self.gives_adapters = lora is not None and most is not None and lora.is_addable

    def run(self) -> dict[str, Any]:
        """All steps that are left, and the models that come of them; metrics."""
        context, section = self.context, self.section
        state = self.trainers.prepare(context.progress)
        step, saved = state["step"], time.monotonic()
        metrics: dict[str, Any] = {}
        if step > 0:
            self._restore(state["driver"])
            context.resume_curve(curve_of(context.progress, step), step)
            metrics = context.curve.metrics_after(step)
        window, differ = MetricWindow(context.progress, step, section.steps), step > 0
        if self.best:
            self.best.resume(state["driver"].get("best"), state["driver"].get("looked", 0))
        metrics |= self._follow(step, self._best_at(step))
        context.report(step, section.steps, "steps", **metrics)
        while step < section.steps:
            with self._saved_if_stopped(step):
                metrics = self._step(step)
            step += 1
            differ |= metrics["reward_deviation"] > 0
            shown = {name: value for name, value in metrics.items() if name in SHOWS or name.startswith("reward")}
            window.add(step, shown)
            context.curve.add(step, "steps", metrics)  # before the checkpoints, which hold the curve
            best = self._best_at(step)
            if step < section.steps or best:
                with self._saved_if_stopped(step):
                    metrics |= self._follow(step, best)
            context.curve.add(step, "steps", metrics)
            due = step < section.steps and time.monotonic() - saved > context.resources.progress_seconds
            if due or context.stopping.is_set():
                self._save(step, self._state())
                saved = time.monotonic()
            context.report(step, section.steps, "steps", **metrics)
        self.sampler.close()
        self._export()
        self.trajectories.settle()
        told = {"warnings": warnings} if (warnings := self._warnings(differ)) else {}
        return {**metrics, **window.metrics(), **told, "steps": section.steps, "parameters": state["parameters"]}

    def _export(self) -> None:
        """Write the models."""
        models = {POLICY: True, CRITIC: self.section.critic, AVERAGE: self.section.ema}
        for name in [name for name, there in models.items() if there]:
            adapter = self.context.outputs[ADAPTER] if name == POLICY else None
            self.trainers.export(name, self.context.outputs[name], adapter)

    def _warnings(self, differ: bool) -> list[str]:
        """What people should know; ``differ``: whether the rewards of any step did."""
        warnings = unmoved(self.context.inputs["policy"], self.context.outputs[POLICY])
        if not differ:
            warnings.append("in every step all completions had equal rewards: nothing can be learnt from rl.rewards")
        return [*warnings, *self.rewarding.warnings()]

    def _best_at(self, step: int) -> Best | None:
        """The best policy, if a look is due after so many steps."""
        return self.best if self.best and self.best.is_due(step) else None

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`_state` gave."""
        self.sampler.restore(state["sampler"])
        self.rewarding.restore(state["rewarding"])
        if "failures" in state:
            self.sources.restore(state["failures"])
        self.kl_coefficient = state["kl_coefficient"]
        self.values.restore(state["returns"])

    def _step(self, step: int) -> dict[str, float]:
        """One step, up to and with the update of the policy; its metrics."""
        samples, found = self.rewarding.experience(self.sampler, step)
        with self.watch.part("transfer"):
            self.sampler.rest()
        found = reward_metrics(samples, self.section.rewards, found)
        section, used = self.section, [row for row in samples if row["used"]]
        data, needed = step_data(used), self._asks_for_old(len(used))
        with self.watch.part("transfer"):
            self.trainers.take(data)
        if needed or section.critic or section.kl.coefficient > 0:
            with self.watch.part("logps"):
                data.numbers.update(self.trainers.forward(needed, self._wanted(step, needed)))
        if section.critic:
            data.numbers["old_values"] = self.values.values_of(data.numbers["old_values"])
        rewards = [row["reward"] for row in used]
        steps = step_rewards(used) if any(reward.by_step for reward in section.rewards) else None
        found |= add_advantages(data, rewards, section.advantage, section.kl, self.kl_coefficient, steps)
        if self.trajectories.keeps(step):
            self.trajectories.write(step, samples, data)
        else:
            self.trajectories.drop(step)
        coefficient = self.kl_coefficient
        learnt_from = {name: values for name, values in data.numbers.items() if name in ("advantages", "returns")}
        if "returns" in learnt_from:
            learnt_from["returns"] = self.values.targets_of(learnt_from["returns"])
        with self.watch.part("train"):
            try:
                found |= _averages(self.trainers.update(learnt_from, coefficient))
                self._check_mismatch(step, found.get("mismatch", 0.0))
            except NumericError:  # for whoever looks at the rows of this step
                if not self.trajectories.keeps(step):
                    self.trajectories.write(step, samples, data)
                self.trajectories.settle()
                raise
        trains = section.critic is None or step >= section.critic.steps_ahead
        if section.kl.target is not None and trains:
            found["kl_coefficient"] = coefficient
            self._adapt(found["kl"], section.kl.target, len(used))
        tokens = sum(int(row["mask"].sum()) for row in samples)
        self._count("completion_tokens", tokens)
        self._count("steps", 1)
        truncated = sum(row["finish_reason"] == "length" for row in samples) / len(samples)
        return {**found, "completion_length": tokens / len(samples), "truncated": truncated}

    def _check_mismatch(self, step: int, difference: float) -> None:
        """Raise NumericError if the policy that sampled is not the one that is trained, by ``difference`` in nats per token."""
        if difference <= self.section.mismatch.stop_above:
            return
        ahead = self.section.execution.max_staleness
        why = f"it moves too far in {ahead} steps (rl.execution)" if ahead else "the engine does not hold the policy"
        raise NumericError(
            f"step {step}: the policy that sampled and the one that is trained differ by {difference:.3g} nats per token, "
            f"above rl.mismatch.stop_above {self.section.mismatch.stop_above:g}: {why}"
        )

    def _adapt(self, kl: float, target: float, completions: int) -> None:
        self.kl_coefficient = adapted_coefficient(self.kl_coefficient, kl, target, completions, self.section.kl.horizon)

    def _asks_for_old(self, completions: int) -> bool:
        """Whether the policy moves while it trains on so many: the clipped ratio looks back to where it began."""
        training, section = self.section.training, self.section
        off_policy = training.num_train_epochs > 1 or training.batch_size < completions
        return off_policy or (section.kl.place == "reward" and section.kl.coefficient > 0)

    def _wanted(self, step: int, old: bool) -> list[str]:
        """Which numbers of the ranks are needed here: for rewards and advantages, or to be kept."""
        section, all_of_them = self.section, self.trajectories.keeps(step)
        in_reward = section.kl.place == "reward" and section.kl.coefficient > 0
        there = {
            "old_logps": old and (all_of_them or in_reward),
            "reference_logps": section.kl.coefficient > 0 and (all_of_them or in_reward),
            "old_values": section.critic is not None,
        }
        return [name for name, needed in there.items() if needed]

    def _follow(self, step: int, best: Best | None = None) -> dict[str, float]:
        """Let the engines have the weights after so many steps, and look whether these are the ``best``; metrics."""
        with self.sampler.still(step, empty=best is not None):
            with self.watch.part("transfer"):
                if step == 0 or (self.gives_adapters and not self.engines_have_start):
                    self._start()
                if step and self.gives_adapters:
                    self._give_adapter(step)
                elif step:
                    self._transfer(step)
            if best is None:
                return {}
            export = partial(self.trainers.export, POLICY)
            with self.watch.part("best"):
                return best.look(step, self.sampling, self.rewarding.sources, export)

    def _start(self) -> None:
        """The policy before the first step into the engines: in 4 bits the trainers alone have it."""
        if self.section.training.in_4bit:
            self._transfer(0, merge=False)
        else:
            self.engines.load(self.context.inputs["policy"], self.sampling.policy)
        self.engines_have_start = True

    def _transfer(self, step: int, merge: bool = True) -> None:
        """The trainers' weights into the engines, bucket by bucket; their adapters are merged in or left out."""
        version = version_of(self.sampling.policy, step)
        shares = self.trainers.buckets()
        self.engines.begin_update()
        self.trainers.send(shares, self.engines.group, Engine.take_bucket, merge)
        self.engines.end_update(version, step)

    def _give_adapter(self, step: int) -> None:
        """The trainers' adapter into the engines, which have the weights beside it."""
        self.trainers.send_adapter(self.engines.group, Engine.take_adapter)
        self.engines.use_adapter(version_of(self.sampling.policy, step), step)

    @contextmanager
    def _saved_if_stopped(self, step: int) -> Iterator[None]:
        """Save the state at the beginning if this is stopped, which happens only while the trainers are still in it."""
        state = self._state()
        try:
            yield
        except Stopped:
            self._save(step, state)
            raise

    def _state(self) -> dict[str, Any]:
        """All that a run that goes on needs to know beside what its trainers save."""
        state: dict[str, Any] = {
            "sampler": self.sampler.state,
            "rewarding": self.rewarding.state,
            "kl_coefficient": self.kl_coefficient,
            "returns": self.values.state,
        }
        if not state["sampler"]["pending"]:  # these are rewarded again, and would count twice
            state["failures"] = self.sources.recent
        return state | ({"best": self.best.state, "looked": self.best.looked} if self.best else {})

    def _save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; the older ones go once it is complete."""
        self.trajectories.settle()
        self.trainers.save_progress(self.context.progress, state, self.context.curve.to_bytes())
        drop_older(self.context.progress, step)
        if self.best:
            self.best.checkpointed()

    def _count(self, name: str, value: float) -> None:
        self.context.cost[name] = self.context.cost.get(name, 0.0) + value


def _averages(reports: Sequence[dict[str, StepReport]]) -> dict[str, float]:
    """Of the learners' reports, rank by rank: losses over their normalisers, everything else over trained tokens."""
    metrics: dict[str, float] = {}
    for learner in reports[0]:
        ranks = [report[learner] for report in reports]
        sums = {name: sum(rank.sums.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank.sums}
        tokens = max(sums.pop("trained_tokens", 0.0), 1.0)
        normaliser = max(sum(rank.normaliser for rank in ranks), 1.0)
        prefix = "" if learner == "policy" else f"{learner}_"
        for name, value in sums.items():
            metrics[f"{prefix}{name}"] = value / (normaliser if name in ("loss", "aux_loss") else tokens)
        if ranks[0].steps:  # none of its own for what is mixed into another's steps
            metrics[f"{prefix}grad_norm"] = ranks[0].grad_norm
            metrics[f"{prefix}learning_rate"] = ranks[0].learning_rate
    return metrics
