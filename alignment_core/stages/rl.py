"""Stage: reinforcement learning of a policy from its own samples.

A step samples the next prompts, rewards the completions, works out what each token was worth, and trains on them; then
the engines take the new weights. What a step does follows from its number and the weights alone: a run that was killed
goes on from its last checkpoint to the same policy.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.errors import DataError, NumericError
from alignment_core.evaluation.rewards import verify
from alignment_core.evaluation.verifiers import verifier_content
from alignment_core.recipes.rl import RlConfig
from alignment_core.rollout.experience import Samples, put_advantages, put_numbers, step_schema
from alignment_core.rollout.judges import FORWARD, Judge, check_tokenizer
from alignment_core.rollout.records import shard_rows, write_table
from alignment_core.rollout.rewards import RunningMean, Source, length_penalties, teaching, total_rewards
from alignment_core.stages.base import Stage, StageConfig, StageContext
from alignment_core.stages.best import Best
from alignment_core.stages.generate import check_length
from alignment_core.training.batches import epoch_order
from alignment_core.training.checkpoints import drop_incomplete, drop_older

if TYPE_CHECKING:
    from alignment_core.rollout.engine import Engine  # noqa: F401 (what the actors run belongs to this stage's key)
    from alignment_core.training.worker import TrainWorker  # noqa: F401

POLICY, TRAJECTORIES = "policy", "trajectories"
RESULTS = {"last": POLICY, "average": "ema", "best": "best"}
"""The folder of the artifact that is the run's policy, by ``rl.result``."""


class RlStageConfig(StageConfig):
    """How to learn, and what rewards."""

    section: RlConfig
    trust_remote_code: bool = False

    def content(self) -> Any:
        inputs: dict[str, Any] = {"prompts": True, "pretraining": {"data"}, "best": {"prompts"}}
        section = self.section.model_dump(mode="json", exclude={**inputs, "result": True})
        for number, reward in enumerate(section["rewards"]):
            reward["reward_model"] = reward["reward_model"] is not None  # which one is an input
            if reward["verifier"] is not None:
                reward["verifier"] = verifier_content(reward["verifier"], f"{_field(number)}.verifier")
        return section


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
            held_out = _read_prompts(context.inputs["held_out"])
            self.best = Best(context, self.section, self.section.best, held_out, self.tokenizer)
        self.wait = context.resources.wait_timeout_seconds
        self.trajectories = context.progress / TRAJECTORIES
        self.seconds: dict[str, float] = {}
        self.engines: Any = None
        self.trainers: Any = None
        self.sources: list[Source] = []
        self.drawn = 0
        """Prompts that were taken so far, whether they taught something or not."""
        self.running = [RunningMean() for _ in self.section.rewards]
        self.kl_coefficient = self.section.kl.coefficient

    def run(self) -> dict[str, Any]:
        from alignment_core.training.reinforcement import RlJob

        context, section = self.context, self.section
        self.trajectories.mkdir(exist_ok=True)
        drop_incomplete(context.progress)
        trust = self.config.trust_remote_code
        job = RlJob(section, str(self.model), self._critic(), context.seed, trust, self._pretraining())
        prompts = [*self.prompts, *(self.best.prompts if self.best else ())]
        longest = max(len(prompt["prompt_ids"]) for prompt in prompts)
        length = longest + section.generation.max_completion_length
        check_length(self.model, longest, length)
        reference = context.references["policy"]
        with (
            context.machines.engines(
                self.model, reference, length, job.trust_remote_code, context.turn
            ) as self.engines,
            context.machines.trainers(context.turn) as self.trainers,
            ExitStack() as judges,
        ):
            self.sources = [self._source(number, judges) for number in range(len(section.rewards))]
            state = self.trainers.all("open_rl", job, context.resources, str(context.progress), timeout=self.wait)[0]
            step, saved, metrics = state["step"], time.monotonic(), {}
            if step == 0:
                self.engines.all("load", str(self.model), str(reference), timeout=self.wait)
            else:
                self.drawn = state["driver"]["drawn"]
                self.running = [RunningMean(one) for one in state["driver"]["running"]]
                self.kl_coefficient = state["driver"]["kl_coefficient"]
                self._timed("transfer", self._transfer, step)
            if self.best:
                self.best.resume(state["driver"].get("best"))
            context.report(step, section.steps, "steps")
            while step < section.steps:
                metrics = self._step(step)
                step += 1
                if step < section.steps or self.best:
                    self._timed("transfer", self._transfer, step)
                if self.best:
                    metrics |= self._timed("best", self._look, self.best, step)
                due = step < section.steps and time.monotonic() - saved > context.resources.progress_seconds
                if due or context.stopping.is_set():
                    self._save(step)
                    saved = time.monotonic()
                context.report(step, section.steps, "steps", **metrics)
            models = {POLICY: True, "critic": section.critic, "ema": section.ema}
            for name in [name for name, there in models.items() if there]:
                self.trainers.all("do", "export", name, str(context.output / name), timeout=self.wait)
        shutil.copytree(self.trajectories, context.output / TRAJECTORIES)
        if self.best:
            metrics |= self.best.copy_to(context.output / RESULTS["best"])
        context.cost.update({f"{name}_seconds": round(value, 3) for name, value in self.seconds.items()})
        return {**metrics, "steps": section.steps, "parameters": state["parameters"]}

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

    def _source(self, number: int, judges: ExitStack) -> Source:
        """What gives the rewards of the section with this number."""
        reward, resources = self.section.rewards[number], self.context.resources
        if reward.verifier is not None:
            return partial(
                verify,
                reward.verifier,
                timeout=resources.reward_timeout_seconds,
                max_failed=reward.max_failed,
                fields=(f"{_field(number)}.verifier", f"{_field(number)}.max_failed"),
            )
        from alignment_core.models.saving import checkpoint_dtype

        model, trust = self.context.inputs[f"reward-{number}"], self.config.trust_remote_code
        check_tokenizer(model, f"reward model of {_field(number)}", self._texts(), trust)
        arguments = {
            "model": str(model),
            "head": "score",
            "bf16": checkpoint_dtype(model) != "float32",
            "token_budget": resources.max_tokens_per_microbatch,
            "device": self.context.machines.device,
            "trust_remote_code": trust,
        }
        group = judges.enter_context(self.context.machines.judges(f"reward-{number}", FORWARD, arguments))
        return Judge(group, self.wait)

    def _texts(self) -> Samples:
        """Prompts as if they were completions, for a look at what tokens mean."""
        return [
            {
                "completion_ids": prompt["prompt_ids"],
                "completion_text": self.tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=True),
            }
            for prompt in self.prompts
        ]

    def _step(self, step: int) -> dict[str, float]:
        """One step, up to and with the update of the policy; its metrics."""
        samples, found = self._experience(step)
        path = self.trajectories / f"step-{step:06d}.parquet"
        section, used = self.section, [row for row in samples if row["used"]]
        needed = self._asks_for_old()
        if needed or section.critic or section.kl.coefficient > 0:
            write_table(used, step_schema(), path)
            for values in self._timed(
                "logps", self.trainers.all, "do", "forward", str(path), needed, timeout=self.wait
            ):
                for name, one in values.items():
                    put_numbers(used, name, one)
        found |= put_advantages(used, section.advantage, section.kl, self.kl_coefficient)
        write_table(samples, step_schema(), path)
        coefficient = self.kl_coefficient
        reports = self._timed("train", self.trainers.all, "do", "update", str(path), coefficient, timeout=self.wait)
        if not section.trajectories.keeps(step, section.steps):
            path.unlink()
        found |= _averages(reports)
        if (difference := found.get("mismatch", 0.0)) > section.mismatch.stop_above:
            raise NumericError(
                f"step {step}: the policy that sampled and the one that is trained differ by {difference:.3g} nats per token, "
                f"above rl.mismatch.stop_above {section.mismatch.stop_above:g}: the engine does not hold the policy"
            )
        if section.kl.target is not None and "kl" in found:  # none while the critic trains alone
            found["kl_coefficient"] = coefficient
            self._adapt(found["kl"], section.kl.target, len(used))
        tokens = sum(len(row["completion_ids"]) for row in samples)
        self._count("completion_tokens", tokens)
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
            fresh = self._timed("generate", self._sample, step, attempts, section.prompts_per_step - used)
            fresh = self._timed("reward", self._reward, fresh)
            samples += fresh
            used = len({row["group"] for row in samples if row["used"]})
            attempts += 1
        if not used:
            raise DataError(
                f"step {step}: none of {len({row['group'] for row in samples})} prompts has completions that differ in their "
                "reward (rl.filter); the task is too easy or too hard for the policy, or rl.filter.low and .high are wrong"
            )
        groups = len({row["group"] for row in samples})
        chosen = sorted(samples, key=lambda row: not row["used"])  # stable
        rewarded = [row for row in chosen if row["used"]]
        self._shape(rewarded)
        given = np.array([row["rewards"] for row in samples])
        means = {f"reward_{number}": float(column.mean()) for number, column in enumerate(given.T)}
        return chosen, {**means, "prompts_used": used / groups}

    def _shape(self, rows: Samples) -> None:
        """The one reward of each row, from those of all sources."""
        raw_SR = np.array([row["rewards"] for row in rows])
        groups_S = np.array([row["group"] for row in rows])
        total_S = total_rewards(raw_SR, groups_S, self.section.rewards, self.running)
        lengths_S = np.array([len(row["completion_ids"]) for row in rows])
        cut_S = np.array([row["finish_reason"] == "length" for row in rows])
        longest = self.section.generation.max_completion_length
        total_S = total_S + length_penalties(lengths_S, cut_S, longest, self.section.shaping)
        for row, reward in zip(rows, total_S, strict=True):
            row["reward"] = float(reward)

    def _asks_for_old(self) -> bool:
        """Whether the policy moves away from the one that sampled while it trains on the samples."""
        training, section = self.section.training, self.section
        completions = section.prompts_per_step * section.generation.num_generations
        off_policy = training.num_train_epochs > 1 or training.batch_size < completions
        return off_policy or (section.kl.place == "reward" and section.kl.coefficient > 0)

    def _sample(self, step: int, attempt: int, count: int) -> Samples:
        """Completions of the next ``count`` prompts; an epoch takes each prompt once."""
        generation, size = self.section.generation, self.section.generation.shard_size
        numbers = [self._prompt(self.drawn + index) for index in range(count)]
        first = self.drawn
        self.drawn += count
        chosen, policy = [self.prompts[number] for number in numbers], self._version(step)
        shards = [chosen[start : start + size] for start in range(0, count, size)]
        jobs = [
            (
                index,
                (
                    policy,
                    [prompt["prompt_ids"] for prompt in shard],
                    generation,
                    self.tokenizer.eos_token_id,
                    self.context.derive("step", step, attempt, index),
                ),
            )
            for index, shard in enumerate(shards)
        ]
        found = dict(self.engines.spread("generate", jobs, timeout=self.wait))
        rows = [
            row
            for index, shard in enumerate(shards)
            for row in shard_rows(shard, index * size, found[index], self.tokenizer, policy)
        ]
        for row in rows:
            row["group"] = first + row["prompt"]
            row["prompt"] = numbers[row["prompt"]]
            row["rollout_logps"] = row.pop("logps")
            row["mask"] = [True] * len(row["completion_ids"])
        return rows

    def _prompt(self, draw: int) -> int:
        """The number of the prompt that is drawn at this place of the whole run."""
        epoch, index = divmod(draw, len(self.prompts))
        return epoch_order(len(self.prompts), self.context.seed, epoch)[index]

    def _reward(self, samples: Samples) -> Samples:
        """The samples that all sources give a reward for, with it, and whether they are trained on."""
        section = self.section
        given = list(zip(*(source(samples) for source in self.sources), strict=True))
        kept = [{**row, "rewards": one} for row, one in zip(samples, given, strict=True) if None not in one]
        self._count("failed_rewards", len(samples) - len(kept))
        teaches = {row["group"] for row in kept}
        if section.filter and kept:
            raw_SR, groups_S = np.array([row["rewards"] for row in kept]), np.array([row["group"] for row in kept])
            teaches = teaching(raw_SR, groups_S, section.rewards, section.filter.low, section.filter.high)
        return [{**row, "used": row["group"] in teaches} for row in kept]

    def _transfer(self, step: int) -> None:
        """The weights after so many steps, into the engines."""
        folder = self.context.progress / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        self.trainers.all("do", "export", "policy", str(folder), timeout=self.wait)
        self.engines.all("load", str(folder), self._version(step), timeout=self.wait)

    def _look(self, best: Best, step: int) -> dict[str, float]:
        export = partial(self.trainers.all, "do", "export", POLICY, timeout=self.wait)
        return best.look(step, self._version(step), self.engines, self.sources, export)

    def _version(self, step: int) -> str:
        policy = str(self.context.references["policy"])
        return policy if step == 0 else f"{policy}+{step}"

    def _save(self, step: int) -> None:
        """Write a checkpoint; the older ones go once it is complete."""
        running = [one.state for one in self.running]
        driver = {"drawn": self.drawn, "running": running, "kl_coefficient": self.kl_coefficient}
        if self.best:
            driver["best"] = self.best.state
        self.trainers.all("do", "save_progress", str(self.context.progress), driver, timeout=self.wait)
        drop_older(self.context.progress, step)
        if self.best:
            self.best.checkpointed()

    def _timed(self, part: str, call: Any, *arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        try:
            return call(*arguments, **options)
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started

    def _count(self, name: str, value: float) -> None:
        self.context.cost[name] = self.context.cost.get(name, 0.0) + value


def _field(number: int) -> str:
    """Where the recipe has the reward with this number."""
    return f"rl.rewards.{number}"


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


STAGE = Stage("rl", 1, "rl-run", RlStageConfig, run)
