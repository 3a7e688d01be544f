"""A policy that learns from its own rewarded samples, with a critic and a reference beside it: one rank of it.

The driver samples, rewards and works out advantages; what a rank does with a step's file follows from the file and the
number of the step alone, so that a resumed run needs nothing but weights, optimisers and that number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device
from alignment_core.errors import NumericError
from alignment_core.losses.kl import kl_estimate, kl_with_unbiased_gradient
from alignment_core.losses.logprobs import ratio
from alignment_core.losses.mismatch import correction_weights
from alignment_core.losses.policy import (
    aggregation_normaliser,
    aggregation_weights,
    cispo_loss,
    clipped_ratio_loss,
    sapo_loss,
    sequence_log_ratio,
    value_loss,
)
from alignment_core.models import buckets
from alignment_core.models.buckets import Bucket, Share
from alignment_core.models.handle import Model
from alignment_core.models.microbatch import MicroBatch, Row, TokenSequence
from alignment_core.models.packed import load_frozen, run_packed
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig
from alignment_core.training.batches import epoch_order
from alignment_core.training.checkpoints import newest_progress
from alignment_core.training.learner import Learner, ModelSource, StepReport, Term, save_step
from alignment_core.training.pretraining import Pretraining
from alignment_core.training.schedule import learning_rate


@dataclass(frozen=True)
class RlJob:
    """What to train: plain data that travels to every rank. Paths are local folders of verified artifacts."""

    section: RlConfig
    policy: Model
    critic: Model | None
    """Where the critic starts: a reward model, or the policy itself with a head of its own."""
    seed: int
    pretraining: str | None = None
    """The table of ``section.pretraining``."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> PolicyTrainer:
        """One rank of it."""
        return PolicyTrainer(self, resources, device, rank, world)


@dataclass(frozen=True)
class SampledRow(Row):
    """A prompt with a sampled completion, and for each trained token [T] the numbers that the losses need, by name."""

    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)


def sampled_rows(table: Any) -> list[SampledRow]:
    """Rows of a step's table; what is all null in it is left out."""
    columns = {name: table.column(name).to_pylist() for name in ("prompt_ids", "completion_ids", "mask")}
    present = {name: table.column(name).to_pylist() for name in NUMBERS if table.column(name).null_count == 0}
    rows = []
    for number in range(table.num_rows):
        prompt, completion = columns["prompt_ids"][number], columns["completion_ids"][number]
        trained = np.asarray(columns["mask"][number], bool)
        ids = np.concatenate([np.asarray(prompt, np.int64), np.asarray(completion, np.int64)])
        targets = np.concatenate([np.zeros(len(prompt), bool), trained])
        numbers = {name: np.asarray(values[number], np.float32)[trained] for name, values in present.items()}
        rows.append(SampledRow(number, (TokenSequence(ids, targets),), numbers=numbers))
    return rows


NUMBERS = ("rollout_logps", "old_logps", "reference_logps", "old_values", "advantages", "returns")
"""Columns with a number for each token of the completion."""


class PolicyTrainer:
    """Policy, critic and reference on this rank. Create it on every rank at once; its methods are collective."""

    def __init__(self, job: RlJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job, self.section, self.device, self.rank, self.world = job, job.section, device, rank, world
        training = job.section.training
        bonus = job.section.loss.entropy_bonus > 0
        adapters = derive_seed(job.seed, "adapters")
        policy = ModelSource(job.policy, "lm", None, adapters, bonus)
        decay = job.section.ema.decay if job.section.ema else None
        self.learners = {"policy": Learner(policy, training, resources, device, rank, world, decay)}
        if job.critic is not None and job.section.critic is not None:
            source = ModelSource(job.critic, "value", derive_seed(job.seed, "head"), adapters)
            own = training.model_copy(update={"learning_rate": job.section.critic.learning_rate})
            self.learners["critic"] = Learner(source, own, resources, device, rank, world)
        self.sender = buckets.Sender(self.policy.packed.model, rank, self.policy.zero_stage)
        self.pretraining: Pretraining | None = None
        if job.section.pretraining is not None:
            assert job.pretraining is not None, "the flow builds it"
            self.pretraining = Pretraining(job.section.pretraining, Path(job.pretraining), job.seed)
        self.reference: Callable[..., Tensor] | None = None
        if job.section.kl.coefficient > 0 and training.lora:
            self.reference = self.policy.base  # no second copy: the policy without its adapters is what it started from
        elif job.section.kl.coefficient > 0:
            dtype = torch.bfloat16 if training.bf16 else torch.float32
            self.reference = load_frozen(job.policy, "lm", dtype, device.torch_device, self.policy.packed.shares)
        self.step, self.kl_coefficient = 0, job.section.kl.coefficient
        self.temperature = job.section.generation.temperature

    @property
    def policy(self) -> Learner:
        return self.learners["policy"]

    def prepare(self, progress: str) -> dict[str, Any]:
        """Resume from the newest complete checkpoint in ``progress``; where we stand, and what the driver had left there."""
        newest = newest_progress(Path(progress), self.policy.layout())
        driver: dict[str, Any] = {}
        if newest is not None:
            described = json.loads((newest / "complete.json").read_text())
            for name, learner in self.learners.items():
                learner.restore(newest / name, described["updates"][name])
            self.step, driver = described["step"], described["driver"]
        return {"step": self.step, "driver": driver, "parameters": self.policy.parameters()}

    def forward(self, path: str, old: bool) -> dict[str, list[tuple[int, np.ndarray]]]:
        """For this rank's rows of the step's file, by column: (row number, values of its trained tokens [T]).

        ``old`` asks for the policy's own log-probabilities; the reference's and the critic's values come if there are any.
        """
        rows = sampled_rows(_read_used(path))
        asked: list[tuple[str, Any, bool]] = []
        if old:
            asked.append(("old_logps", self.policy.engine, self.policy.packed.shares))
        if self.reference is not None:
            asked.append(("reference_logps", self.reference, self.policy.packed.shares))  # of the same architecture
        if "critic" in self.learners:
            asked.append(("old_values", self.learners["critic"].engine, self.learners["critic"].packed.shares))
        found: dict[str, list[tuple[int, np.ndarray]]] = {}
        for learner in self.learners.values():
            learner.engine.eval()
        packs = {share: self.policy.micro_batches(rows, share) for share in {share for _, _, share in asked}}
        for name, model, share in asked:
            values = found[name] = []
            for micro in packs[share]:
                with torch.no_grad():
                    output = run_packed(model, micro, self.temperature).float().cpu().numpy()
                values += _by_row(output if output.ndim == 1 else output[0], micro.rows)
        return found

    def update(self, path: str, kl_coefficient: float) -> dict[str, StepReport]:
        """All optimiser steps on the step's file; a report for each learner that took some, and for ``pretraining``."""
        rows, self.kl_coefficient = sampled_rows(_read_used(path)), kl_coefficient
        reports: dict[str, StepReport] = {}
        for name, learner in self.learners.items():
            waits = name == "policy" and self.section.critic and self.step < self.section.critic.steps_ahead
            if not waits:
                reports |= self._update(name, learner, rows)
        self.step += 1
        return reports

    def _update(self, name: str, learner: Learner, rows: list[SampledRow]) -> dict[str, StepReport]:
        reports, training = {name: StepReport()}, self.section.training
        mixed = self.pretraining if name == "policy" else None
        if mixed:
            reports["pretraining"] = StepReport()
        rate = learning_rate(learner.training, self.step, self.section.steps)
        loss = self._policy_loss if name == "policy" else self._value_loss
        for epoch in range(training.num_train_epochs):
            order = epoch_order(len(rows), derive_seed(self.job.seed, "step", self.step), epoch)
            for first in range(0, len(rows), training.batch_size):
                batch = [rows[number] for number in order[first : first + training.batch_size]]
                torch.manual_seed(derive_seed(self.job.seed, name, learner.steps, self.rank))
                terms = [Term(batch, loss, self._normaliser(batch), reports[name], temperature=self.temperature)]
                if mixed:
                    terms.append(mixed.term(learner.steps, reports["pretraining"]))
                try:
                    learner.step(terms, rate)
                except NumericError as error:
                    rows_of_batch = ", ".join(str(row.number) for row in batch)
                    raise NumericError(
                        f"{name}: {error} at step {self.step} of {self.section.steps}; the rows of its batch are "
                        f"{rows_of_batch} of step-{self.step:06d}.parquet"
                    ) from None
        return reports

    def _normaliser(self, batch: Sequence[SampledRow]) -> float:
        tokens = sum(int(row.sequences[0].targets.sum()) for row in batch)
        longest = self.section.generation.max_completion_length
        return aggregation_normaliser(tokens, len(batch), self.section.loss.aggregation, longest)

    def _policy_loss(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, kl = self.section.loss, self.section.kl
        logps_K, entropy_K = output if output.dim() == 2 else (output, None)
        advantages_K = _gathered("advantages", micro, logps_K)
        old_K = _gathered("old_logps", micro, logps_K) if _has("old_logps", micro) else logps_K.detach()
        rollout_K = _gathered("rollout_logps", micro, logps_K)
        log_ratio_K = logps_K - old_K
        loss_K = policy_loss(config, log_ratio_K, logps_K, advantages_K, micro)
        correction = self.section.mismatch
        if correction.correction != "none":
            loss_K = loss_K * correction_weights(
                old_K - rollout_K,
                rollout_K,
                micro.sequence_K,
                micro.sequences,
                level=correction.level,
                action=correction.correction,
                measure=correction.measure,
                low=correction.low,
                high=correction.high,
            )
        sums = {
            "ratio": ratio(log_ratio_K).sum(),
            "clipped": ((log_ratio_K.exp() > 1 + config.clip_high) | (log_ratio_K.exp() < 1 - config.clip_low)).sum(),
            "surprise": -logps_K.sum(),
            "mismatch": kl_estimate(rollout_K, old_K, "k3").sum(),
            "trained_tokens": logps_K.new_tensor(float(len(logps_K))),
        }
        if _has("reference_logps", micro):
            reference_K = _gathered("reference_logps", micro, logps_K)
            sums["kl"] = kl_estimate(logps_K.detach(), reference_K, kl.estimator).sum()
            if kl.place == "loss":
                if kl.unbiased_gradient:
                    kl_K = kl_with_unbiased_gradient(logps_K, reference_K, kl.estimator, log_ratio_K)
                else:
                    kl_K = kl_estimate(logps_K, reference_K, kl.estimator)
                loss_K = loss_K + self.kl_coefficient * kl_K
        if entropy_K is not None:
            sums["entropy"] = entropy_K.sum()
            loss_K = loss_K - config.entropy_bonus * entropy_K
        weights_K = aggregation_weights(micro.sequence_K, micro.sequences, config.aggregation)
        loss = (weights_K * loss_K).sum()
        return loss, {name: value.detach() for name, value in {**sums, "loss": loss}.items()}

    def _value_loss(self, values_K: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.section.critic is not None
        old_K, returns_K = _gathered("old_values", micro, values_K), _gathered("returns", micro, values_K)
        loss_K = value_loss(values_K.float(), old_K, returns_K, self.section.critic.clip)
        weights_K = aggregation_weights(micro.sequence_K, micro.sequences, self.section.loss.aggregation)
        loss = (weights_K * loss_K).sum()
        sums = {
            "error": (values_K.float() - returns_K).abs().sum(),
            "trained_tokens": values_K.new_tensor(float(len(values_K))),
        }
        return loss, {name: value.detach() for name, value in {**sums, "loss": loss}.items()}

    def buckets(self) -> list[Share]:
        """Which of the policy's weights travel together to the engines.

        Engines on the same GPUs that slept during the update have back what it alone took of their memory.
        """
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
        return buckets.plan(self.policy.packed.model)

    def bucket(self, share: Share) -> Bucket:
        """These weights of the policy; nothing on other ranks than the first."""
        self.policy.check_sound()
        return self.sender.bucket(share)

    def export(self, name: str, directory: str) -> None:
        """Write the ``policy``, its moving ``average`` or the ``critic`` as a Hugging Face folder."""
        average = name == "average"
        self.learners["policy" if average else name].export(Path(directory), average)

    def save_progress(self, directory: str, driver: dict[str, Any]) -> None:
        """Write a checkpoint of this step below ``directory``, with what the driver wants back."""
        updates = {name: learner.steps for name, learner in self.learners.items()}
        save_step(Path(directory), self.step, self.learners, updates=updates, driver=driver)

    def close(self) -> None:
        """Let go of the models' memory."""
        for learner in self.learners.values():
            learner.close()


def policy_loss(
    config: PolicyLossConfig, log_ratio_K: Tensor, logps_K: Tensor, advantages_K: Tensor, micro: MicroBatch
) -> Tensor:
    """The loss of each trained token that the recipe asks for. [K] each."""
    low, high = config.clip_low, config.clip_high
    if config.loss_type == "cispo":
        return cispo_loss(log_ratio_K, logps_K, advantages_K, low, high)
    if config.loss_type == "sapo":
        return sapo_loss(log_ratio_K, advantages_K, *config.sapo_temperatures)
    if config.loss_type == "gspo":
        log_ratio_K = sequence_log_ratio(log_ratio_K, micro.sequence_K, micro.sequences)
    return clipped_ratio_loss(log_ratio_K, advantages_K, low, high, config.dual_clip)


def _has(name: str, micro: MicroBatch) -> bool:
    return all(isinstance(row, SampledRow) and name in row.numbers for row in micro.rows)


def _gathered(name: str, micro: MicroBatch, like: Tensor) -> Tensor:
    """The numbers of a pack's trained tokens, in the order of its targets. [K]"""
    parts = [row.numbers[name] for row in micro.rows if isinstance(row, SampledRow)]
    joined = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return torch.from_numpy(joined).to(like.device)


def _by_row(values_K: np.ndarray, rows: Iterable[Row]) -> list[tuple[int, np.ndarray]]:
    """[K] of a pack → the part of each row, with its number."""
    parts, first = [], 0
    for row in rows:
        tokens = int(row.sequences[0].targets.sum())
        parts.append((row.number, values_K[first : first + tokens]))
        first += tokens
    return parts


def _read_used(path: str) -> Any:
    """The rows of a step's file that are trained on."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return table.filter(table.column("used"))
