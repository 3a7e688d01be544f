"""Stage: reinforcement learning of a policy from its own samples.

A step samples the next prompts, rewards the completions, works out what each token was worth, and trains on them; then
the engines take the new weights. What a step does follows from its number and the weights alone: a run that was killed
goes on from its last checkpoint to the same policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.environments.environments import Environments, environment_content
from alignment_core.environments.episode import version_of
from alignment_core.errors import DataError, NumericError, Stopped
from alignment_core.execution.base import EngineRequest, Stage, StageConfig, StageContext
from alignment_core.execution.course import Course, unmoved
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rewards import base as rewards
from alignment_core.rewards.failures import numbers, reasons
from alignment_core.rewards.judges import in_actors
from alignment_core.rewards.sources import RewardSources
from alignment_core.rewards.totals import RunningMean, length_penalties, teaching, total_rewards
from alignment_core.rollout.ahead import Ahead
from alignment_core.rollout.episodes import Draws
from alignment_core.rollout.experience import Samples, put_advantages, put_numbers, step_schema
from alignment_core.rollout.in_step import InStep
from alignment_core.rollout.records import write_table
from alignment_core.rollout.sampling import Sampling
from alignment_core.stages.best import Best
from alignment_core.stages.generate import check_length
from alignment_core.stages.stopping import ended_when
from alignment_core.training.checkpoints import drop_incomplete, drop_older, link_tree

if TYPE_CHECKING:
    from alignment_core.inference.engine import Engine  # noqa: F401 (what the actors run belongs to this stage's key)
    from alignment_core.training.worker import TrainWorker  # noqa: F401

SHOWS = {"reward": "reward", "kl": "KL", "completion_length": "length", "critic_loss": "critic loss"}
FIELD = "rl.rewards"
POLICY, AVERAGE, BEST, CRITIC, TRAJECTORIES = "policy", "average", "best", "critic", "trajectories"
RESULTS = {"last": POLICY, "average": AVERAGE, "best": BEST}
"""The output that is the run's policy, by ``rl.result``."""
OUTPUTS = {POLICY: "model", AVERAGE: "model", BEST: "model", CRITIC: "critic", TRAJECTORIES: "trajectories"}


class RlStageConfig(StageConfig):
    """How to learn, and what rewards."""

    section: RlConfig
    trust_remote_code: bool = False

    def content(self) -> Any:
        inputs: dict[str, Any] = {"prompts": True, "pretraining": {"data"}, "best": {"prompts"}}
        section = self.section.model_dump(mode="json", exclude={**inputs, "result": True})
        if self.section.environment:
            section["environment"] |= environment_content(self.section.environment)
            section["environment"]["chat_template"] = self.section.prompts.chat_template
        return section | {"rewards": rewards.content(self.section.rewards, FIELD)}

    def code_used(self) -> tuple[str, ...]:
        return rewards.code_used(self.section.rewards)

    def packages_used(self) -> tuple[str, ...]:
        return rewards.packages_used(self.section.rewards)


def run(context: StageContext, config: RlStageConfig) -> dict[str, Any]:
    return Loop(context, config).run()


class Loop:
    """The driver of one run of the stage."""

    def __init__(self, context: StageContext, config: RlStageConfig) -> None:
        import transformers

        self.context, self.config, self.section = context, config, config.section
        self.model = context.inputs["policy"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.model, trust_remote_code=config.trust_remote_code
        )
        self.prompts = _read_prompts(context.inputs["prompts"])
        self.best: Best | None = None
        if self.section.best is not None:
            self.best = Best(context, self.section, self.section.best, _read_prompts(context.inputs["held_out"]))
        self.wait = context.resources.wait_timeout_seconds
        self.trajectories = context.progress / TRAJECTORIES
        self.watch = Stopwatch()
        self.engines: Any = None
        self.trainers: Any = None
        self.sampler: Any = None
        self.sources = self._sources()
        self.environments = self._environments()
        self.running = [RunningMean() for _ in self.section.rewards]
        self.kl_coefficient = self.section.kl.coefficient

    def run(self) -> dict[str, Any]:
        from alignment_core.training.reinforcement import RlJob

        context, section = self.context, self.section
        self.trajectories.mkdir(exist_ok=True)
        drop_incomplete(context.progress)
        trust = self.config.trust_remote_code
        job = RlJob(section, str(self.model), self._critic(), context.seed, trust, self._pretraining())
        prompts = [*self.prompts, *(self.best.draws.prompts if self.best else ())]
        longest = max(len(prompt["prompt_ids"]) for prompt in prompts)
        length = longest + section.generation.max_completion_length
        check_length(self.model, longest, length)
        request = EngineRequest(self.model, context.references["policy"], length, job.trust_remote_code)
        with (
            context.machines.engines_and_trainers(request, context.turn) as (self.engines, self.trainers),
            self.sources,
            closing(self.environments) if self.environments else nullcontext(),
            closing(self._sampler()) as self.sampler,
            ended_when(context.stopping, self.sources.stop, *([self.environments.close] if self.environments else [])),
        ):
            state = self.trainers.all("open_rl", job, context.resources, str(context.progress), timeout=self.wait)[0]
            step, saved = state["step"], time.monotonic()
            metrics: dict[str, float] = {}
            if step > 0:
                self._restore(state["driver"])
            course, differ = Course(context.progress, step, section.steps), step > 0
            if self.best:
                self.best.resume(state["driver"].get("best"), state["driver"].get("looked", 0))
            metrics |= self._follow(step, self._best_at(step))
            context.report(step, section.steps, "steps")
            while step < section.steps:
                with self._saved_if_stopped(step):
                    metrics = self._step(step)
                step += 1
                differ |= metrics["reward_deviation"] > 0
                course.add(step, {name: metrics[name] for name in SHOWS if name in metrics})
                best = self._best_at(step)
                if step < section.steps or best:
                    with self._saved_if_stopped(step):
                        metrics |= self._follow(step, best)
                due = step < section.steps and time.monotonic() - saved > context.resources.progress_seconds
                if due or context.stopping.is_set():
                    self._save(step, self._driver())
                    saved = time.monotonic()
                context.report(step, section.steps, "steps", **metrics)
            self.sampler.close()
            models = {POLICY: True, CRITIC: section.critic, AVERAGE: section.ema}
            for name in [name for name, there in models.items() if there]:
                self.trainers.all("do", "export", name, str(context.outputs[name]), timeout=self.wait)
        link_tree(self.trajectories, context.outputs[TRAJECTORIES])
        if self.best:
            metrics |= self.best.link_to(context.outputs[BEST])
        context.cost.update({f"failed_rewards_{reason}": count for reason, count in self.sources.failed.items()})
        context.cost.update({f"{name}_seconds": round(value, 3) for name, value in self.watch.seconds.items()})
        warnings = unmoved(self.model, context.outputs[POLICY])
        if not differ:
            warnings.append("in every step all completions had equal rewards: nothing can be learnt from rl.rewards")
        told = {"warnings": warnings} if warnings else {}
        return {**metrics, **course.metrics(), **told, "steps": section.steps, "parameters": state["parameters"]}

    def _best_at(self, step: int) -> Best | None:
        """The best policy, if a look is due after so many steps."""
        return self.best if self.best and self.best.is_due(step) else None

    def _sources(self) -> RewardSources:
        context, trust, listed = self.context, self.config.trust_remote_code, self.section.rewards
        opening = rewards.Opening(
            FIELD,
            context.resources,
            tokenizer=self.tokenizer,
            prompts=self.prompts,
            trust_remote_code=trust,
            scores=in_actors(context.machines, context.resources, trust),
        )
        models = {number: context.inputs[f"reward-{number}"] for number, one in enumerate(listed) if one.model}
        return RewardSources(
            listed, opening, models, self.section.prompts_per_step * self.section.generation.num_generations
        )

    def _environments(self) -> Environments | None:
        config, resources = self.section.environment, self.context.resources
        if config is None:
            return None
        return Environments(
            config,
            self.tokenizer,
            processes=resources.environment_processes,
            timeout=resources.reward_timeout_seconds,
            chat_template=self.section.prompts.chat_template,
        )

    def _sampling(self) -> Sampling:
        section, policy = self.section, str(self.context.references["policy"])
        draws = Draws(self.prompts, section.generation, self.context.seed)
        return Sampling(
            self.engines, self.environments, draws, self.tokenizer, policy, self.wait, self.context.stopping
        )

    def _sampler(self) -> InStep | Ahead:
        """What draws prompts and has them answered and rewarded."""
        section, execution = self.section, self.section.execution
        if execution.max_staleness == 0:
            return InStep(self._sampling(), self._reward, self.context.resources.placement == "colocated")
        return Ahead(
            self._sampling(),
            self._reward,
            prompts_per_step=section.prompts_per_step,
            steps=section.steps,
            max_staleness=execution.max_staleness,
            partial=execution.partial_rollouts,
        )

    def _restore(self, driver: dict[str, Any]) -> None:
        """Go on with what :meth:`_driver` gave."""
        self.sampler.restore(driver["sampler"])
        self.running = [RunningMean(one) for one in driver["running"]]
        self.kl_coefficient = driver["kl_coefficient"]

    def _critic(self) -> str | None:
        if self.section.critic is None:
            return None
        return str(self.context.inputs.get("critic", self.model))

    def _pretraining(self) -> str | None:
        if self.section.pretraining is None:
            return None
        path = self.context.inputs["pretraining"] / "train.parquet"
        if not path.is_file():
            raise DataError("the data set of rl.pretraining holds no training rows")
        return str(path)

    def _step(self, step: int) -> dict[str, float]:
        """One step, up to and with the update of the policy; its metrics."""
        samples, found = self._experience(step)
        with self.watch.part("transfer"):
            self.sampler.rest()
        path = self.trajectories / f"step-{step:06d}.parquet"
        section, used = self.section, [row for row in samples if row["used"]]
        needed = self._asks_for_old(len(used))
        if needed or section.critic or section.kl.coefficient > 0:
            write_table(used, step_schema(), path)
            with self.watch.part("logps"):
                found_by_rank = self.trainers.all("do", "forward", str(path), needed, timeout=self.wait)
            for values in found_by_rank:
                for name, one in values.items():
                    put_numbers(used, name, one)
        found |= put_advantages(used, section.advantage, section.kl, self.kl_coefficient)
        write_table(samples, step_schema(), path)
        coefficient = self.kl_coefficient
        with self.watch.part("train"):
            reports = self.trainers.all("do", "update", str(path), coefficient, timeout=self.wait)
        if not section.trajectories.keeps(step, section.steps):
            path.unlink()
        found |= _averages(reports)
        if (difference := found.get("mismatch", 0.0)) > section.mismatch.stop_above:
            ahead = section.execution.max_staleness
            why = (
                f"it moves too far in {ahead} steps (rl.execution)" if ahead else "the engine does not hold the policy"
            )
            raise NumericError(
                f"step {step}: the policy that sampled and the one that is trained differ by {difference:.3g} nats per token, "
                f"above rl.mismatch.stop_above {section.mismatch.stop_above:g}: {why}"
            )
        trains = section.critic is None or step >= section.critic.steps_ahead
        if section.kl.target is not None and trains:
            found["kl_coefficient"] = coefficient
            self._adapt(found["kl"], section.kl.target, len(used))
        tokens = sum(int(sum(row["mask"])) for row in samples)
        self._count("completion_tokens", tokens)
        self._count("steps", 1)
        return {**found, "completion_length": tokens / len(samples)}

    def _adapt(self, kl: float, target: float, completions: int) -> None:
        from alignment_core.losses.kl import adapted_coefficient

        self.kl_coefficient = adapted_coefficient(self.kl_coefficient, kl, target, completions, self.section.kl.horizon)

    def _experience(self, step: int) -> tuple[Samples, dict[str, float]]:
        """Rewarded completions of as many prompts as a step takes, those that are trained on first; and what came of them.

        With dynamic filtering, prompts that teach nothing are kept with ``used`` false, and further ones are sampled for.
        """
        section, samples, used, attempts = self.section, [], 0, 0
        most = section.filter.max_refills if section.filter else 0
        while used < section.prompts_per_step and attempts <= most:
            with self.watch.part("generate"):
                samples += self.sampler.take(section.prompts_per_step - used)
            used = len({row["group"] for row in samples if row["used"]})
            attempts += 1
        given = np.array([row["rewards"] for row in samples if row["failures"] is None])
        if not len(given):
            raise DataError(f"step {step}: no completion has a reward (rl.rewards)")
        if not used:
            raise DataError(
                f"step {step}: rl.filter leaves out all {len({row['group'] for row in samples})} prompts, as the completions "
                "of each have equal rewards, or a mean outside rl.filter.low and .high; the task is too easy or too hard for "
                "the policy, or the bounds do not fit the rewards"
            )
        groups = len({row["group"] for row in samples})
        chosen = sorted(samples, key=lambda row: not row["used"])  # stable
        rewarded = [row for row in chosen if row["used"]]
        self._shape(rewarded)
        means = {f"reward_{number}": float(column.mean()) for number, column in enumerate(given.T)}
        stale_K = step - np.concatenate([row["versions"][row["mask"]] for row in rewarded])
        return chosen, {**means, "prompts_used": used / groups, "staleness": float(stale_K.mean())}

    def _shape(self, rows: Samples) -> None:
        """The one reward of each row, from those of all sources."""
        raw_SR = np.array([row["rewards"] for row in rows])
        groups_S = np.array([row["group"] for row in rows])
        total_S = total_rewards(raw_SR, groups_S, self.section.rewards, self.running)
        lengths_S = np.array([sum(row["mask"]) for row in rows])
        cut_S = np.array([row["finish_reason"] == "length" for row in rows])
        longest = self.section.generation.max_completion_length
        total_S = total_S + length_penalties(lengths_S, cut_S, longest, self.section.shaping)
        for row, reward in zip(rows, total_S, strict=True):
            row["reward"] = float(reward)

    def _asks_for_old(self, completions: int) -> bool:
        """Whether the policy moves while it trains on so many: the clipped ratio looks back to where it began."""
        training, section = self.section.training, self.section
        off_policy = training.num_train_epochs > 1 or training.batch_size < completions
        return off_policy or (section.kl.place == "reward" and section.kl.coefficient > 0)

    def _reward(self, samples: Samples) -> Samples:
        """The samples with what each source gives or why it gives nothing, and whether they are trained on."""
        section = self.section
        with self.watch.part("reward"):
            given = list(zip(*self.sources(samples), strict=True))
        samples = [
            {**row, "rewards": numbers(one), "failures": reasons(one)} for row, one in zip(samples, given, strict=True)
        ]
        kept = [row for row in samples if row["failures"] is None]
        self._count("failed_rewards", len(samples) - len(kept))
        teaches = {row["group"] for row in kept}
        if section.filter and kept:
            raw_SR, groups_S = np.array([row["rewards"] for row in kept]), np.array([row["group"] for row in kept])
            teaches = teaching(raw_SR, groups_S, section.rewards, section.filter)
        return [{**row, "used": row["failures"] is None and row["group"] in teaches} for row in samples]

    def _follow(self, step: int, best: Best | None = None) -> dict[str, float]:
        """Let the engines have the weights after so many steps, and look whether these are the ``best``; metrics."""
        with self.sampler.still(step, empty=best is not None):
            with self.watch.part("transfer"):
                if step == 0:
                    policy = self.context.references["policy"]
                    self.engines.all("load", str(self.model), str(policy), timeout=self.wait)
                else:
                    self._transfer(step)
            if best is None:
                return {}
            export = partial(self.trainers.all, "do", "export", POLICY, timeout=self.wait)
            with self.watch.part("best"):
                return best.look(step, self._sampling(), self.sources, export)

    def _transfer(self, step: int) -> None:
        """The trainers' weights into the engines, bucket by bucket."""
        version = version_of(str(self.context.references["policy"]), step)
        (shares, *_) = self.trainers.all("do", "buckets", timeout=self.wait)
        self.engines.all("begin_update", timeout=self.wait)
        calls = [("do", ("bucket", one)) for one in shares]
        self.trainers.relay(calls, self.engines, "take_bucket", timeout=self.wait)
        self.engines.all("end_update", version, step, timeout=self.wait)

    @contextmanager
    def _saved_if_stopped(self, step: int) -> Iterator[None]:
        """Save the state at the beginning if this is stopped, which happens only while the trainers are still in it."""
        driver = self._driver()
        try:
            yield
        except Stopped:
            self._save(step, driver)
            raise

    def _driver(self) -> dict[str, Any]:
        """All that a run that goes on needs to know beside what its trainers save."""
        running = [one.state for one in self.running]
        driver = {"sampler": self.sampler.state, "running": running, "kl_coefficient": self.kl_coefficient}
        return driver | ({"best": self.best.state, "looked": self.best.looked} if self.best else {})

    def _save(self, step: int, driver: dict[str, Any]) -> None:
        """Write a checkpoint; the older ones go once it is complete."""
        self.trainers.all("do", "save_progress", str(self.context.progress), driver, timeout=self.wait)
        drop_older(self.context.progress, step)
        if self.best:
            self.best.checkpointed()

    def _count(self, name: str, value: float) -> None:
        self.context.cost[name] = self.context.cost.get(name, 0.0) + value


def _averages(reports: list[dict[str, Any]]) -> dict[str, float]:
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


def _read_prompts(data: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    path = data / "train.parquet"
    if not path.is_file():
        raise DataError("there are no prompts to sample for")
    return pq.read_table(path).to_pylist()


STAGE = Stage("rl", 2, OUTPUTS, RlStageConfig, run, SHOWS)
