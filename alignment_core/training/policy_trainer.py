"""A policy that learns from its own rewarded samples, with a critic and a reference beside it: one rank of it.

The driver samples, rewards and works out advantages; what a rank does with a step's data follows from them and the
number of the step alone, so that a resumed run needs nothing but weights, optimisers and that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from alignment_core.models import weight_transfer
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel, load_frozen, run_packed
from alignment_core.models.weight_transfer import Bucket, BucketSpec
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import PolicyLossConfig, RlConfig
from alignment_core.training.checkpoints import described
from alignment_core.training.collectives import sum_over_ranks
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.moving_reference import MovingReference
from alignment_core.training.pretraining import Pretraining
from alignment_core.training.schedule import learning_rate
from alignment_core.training.step_data import StepData
from alignment_core.training.step_report import StepReport


@dataclass(frozen=True)
class RlJob:
    """What to train: plain data that travels to every rank. Paths are local folders of verified artifacts."""

    section: RlConfig
    policy: Model
    critic: Model | None
    """Where the critic starts: a reward model, or the policy itself with a head of its own."""
    seed: int
    pretraining: Path | None = None
    """The table of ``section.pretraining``."""
    reference: Model | None = None
    """What the KL is measured to; None: the policy as it starts."""
    scratch: Path | None = None
    """Folder for rows of ``pretraining`` that are not in memory; None: where temporary files go."""
    context: int | None = None
    """Tokens of the longest sequence that the engines sample."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> PolicyTrainer:
        """One rank of it."""
        return PolicyTrainer(self, resources, device, rank, world)


class PolicyTrainer:
    """Policy, critic and reference on this rank. Create it on every rank at once; its methods are collective."""

    def __init__(self, job: RlJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job, self.section, self.device, self.rank, self.world = job, job.section, device, rank, world
        training = job.section.training
        bonus = job.section.loss.entropy_bonus > 0
        adapters = derive_seed(job.seed, "adapters")
        template = job.section.prompts.chat_template
        policy = ModelSource(job.policy, "lm", None, adapters, bonus, context=job.context, chat_template=template)
        decay = job.section.ema.decay if job.section.ema else None
        self.learners = {"policy": Learner(policy, training, resources, device, rank, world, decay)}
        if job.critic is not None and job.section.critic is not None:
            source = ModelSource(job.critic, "value", derive_seed(job.seed, "head"), adapters, context=job.context)
            own = training.model_copy(update={"learning_rate": job.section.critic.learning_rate})
            self.learners["critic"] = Learner(source, own, resources, device, rank, world)
        self.sender = weight_transfer.Sender(self.policy.packed.model, rank, self.policy.zero_stage)
        self.pretraining: Pretraining | None = None
        if job.section.pretraining is not None:
            assert job.pretraining is not None, "the flow builds it"
            self.pretraining = Pretraining(job.section.pretraining, job.pretraining, job.seed, job.scratch)
        self.reference: Callable[..., Tensor] | None = None
        self.frozen: PackedModel | None = None
        """The reference's weights, where it has its own."""
        starts_below = training.lora and not training.lora.modules_to_save  # its adapters are all that trains
        if job.section.kl.coefficient > 0 and starts_below and job.reference is None:
            self.reference = self.policy.base  # no second copy: the policy without its adapters is what it started from
        elif job.section.kl.coefficient > 0:
            dtype = torch.bfloat16 if training.bf16 else torch.float32
            share = resources.attention == "auto" if job.reference else self.policy.packed.shares_prefixes
            start = job.reference or replace(job.policy, in_4bit=training.in_4bit)
            self.frozen = load_frozen(start, "lm", dtype, device.torch_device, share, job.context)
            self.reference = self.frozen
        every = job.section.kl.refresh_every
        self.moving = MovingReference(self.frozen, self.policy, every) if self.frozen and every else None
        self.step, self.kl_coefficient = 0, job.section.kl.coefficient
        self.batch: StepData
        self.rows: list[Row] = []
        """Of the batch."""
        self.temperature = job.section.generation.temperature

    @property
    def policy(self) -> Learner:
        return self.learners["policy"]

    def layout(self) -> dict[str, Any]:
        """What a checkpoint must share with this job."""
        return self.policy.layout()

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Go on from a complete checkpoint, if there is one; where we stand, and what the driver had left there."""
        driver: dict[str, Any] = {}
        if checkpoint is not None:
            found = described(checkpoint)
            for name, learner in self.learners.items():
                learner.restore(checkpoint / name, found["updates"][name])
            if self.moving:
                self.moving.restore(checkpoint)
            self.step, driver = found["step"], found["driver"]
        return {"step": self.step, "driver": driver, "parameters": self.policy.parameters()}

    def load(self, batch: StepData) -> None:
        """Keep the batch of the next :meth:`update`."""
        self.batch = replace(batch, numbers=dict(batch.numbers))
        self.rows = self.batch.rows()

    def forward(self, old: bool, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Add to the data, on every rank, numbers that take a forward pass: those of the reference and of the critic if there
        are any, and with ``old`` the policy's own log-probabilities. Rank 0 returns those that are ``wanted``, [K] by name.
        """
        asked: list[tuple[str, Any, bool]] = []
        if old:
            asked.append(("old_logps", self.policy.engine, self.policy.packed.shares_prefixes))
        if self.reference is not None:
            shares = (self.frozen or self.policy.packed).shares_prefixes
            asked.append(("reference_logps", self.reference, shares))
        if "critic" in self.learners:
            asked.append(("old_values", self.learners["critic"].engine, self.learners["critic"].packed.shares_prefixes))
        for learner in self.learners.values():
            learner.engine.eval()
        packs = {share: self.policy.micro_batches(self.rows, share) for share in {share for _, _, share in asked}}
        for name, model, share in asked:
            values_K = torch.zeros(len(self.batch.numbers["rollout_logps"]), device=self.device.torch_device)
            for micro in packs[share]:
                with torch.no_grad():
                    output = run_packed(model, micro, self.temperature).float()
                values_K[self._places(micro)] = output if output.ndim == 1 else output[0]
            self.batch.numbers[name] = sum_over_ranks(values_K).cpu().numpy()
        return {name: self.batch.numbers[name] for name in wanted} if self.rank == 0 else {}

    def update(self, numbers: Mapping[str, np.ndarray], kl_coefficient: float) -> dict[str, StepReport]:
        """All optimiser steps on the data with further ``numbers``; a report for each learner that took some, and for
        ``pretraining``."""
        self.batch.numbers.update(numbers)
        self.kl_coefficient = kl_coefficient
        reports: dict[str, StepReport] = {}
        for name, learner in self.learners.items():
            if self.step >= self._first_step(name):
                reports |= self._update(name, learner)
        self.step += 1
        if self.moving:
            self.moving.after(self.step)
        return reports

    def _first_step(self, name: str) -> int:
        """The first step that trains this model: the critic alone is trained before the policy."""
        return self.section.critic.steps_ahead if name == "policy" and self.section.critic else 0

    def _update(self, name: str, learner: Learner) -> dict[str, StepReport]:
        reports, training, rows = {name: StepReport()}, self.section.training, self.rows
        mixed = self.pretraining if name == "policy" else None
        if mixed:
            reports["pretraining"] = StepReport()
        rate = learning_rate(learner.training, self.step, self.section.steps, self._first_step(name))
        loss = self._policy_loss if name == "policy" else self._value_loss
        for epoch in range(training.num_train_epochs):
            seed = derive_seed(self.job.seed, "step", self.step)
            for numbers in self.batch.batches(seed, epoch, training.batch_size):
                batch = [rows[number] for number in numbers]
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

    def _normaliser(self, batch: Sequence[Row]) -> float:
        tokens = sum(int(row.sequences[0].targets.sum()) for row in batch)
        longest = self.section.generation.max_completion_length
        return aggregation_normaliser(tokens, len(batch), self.section.loss.aggregation, longest)

    def _policy_loss(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, kl = self.section.loss, self.section.kl
        logps_K, entropy_K = output if output.dim() == 2 else (output, None)
        advantages_K, rollout_K = self._numbers("advantages", micro), self._numbers("rollout_logps", micro)
        old_K = self._numbers("old_logps", micro) if "old_logps" in self.batch.numbers else logps_K.detach()
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
            "entropy_estimate": -logps_K.sum(),
            "mismatch": kl_estimate(rollout_K, old_K, "k3").sum(),
            "trained_tokens": logps_K.new_tensor(float(len(logps_K))),
        }
        if "reference_logps" in self.batch.numbers:
            reference_K = self._numbers("reference_logps", micro)
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
        old_K, returns_K = self._numbers("old_values", micro), self._numbers("returns", micro)
        loss_K = value_loss(values_K.float(), old_K, returns_K, self.section.critic.clip)
        weights_K = aggregation_weights(micro.sequence_K, micro.sequences, self.section.loss.aggregation)
        loss = (weights_K * loss_K).sum()
        sums = {
            "error": (values_K.float() - returns_K).abs().sum(),
            "trained_tokens": values_K.new_tensor(float(len(values_K))),
        }
        return loss, {name: value.detach() for name, value in {**sums, "loss": loss}.items()}

    def _places(self, micro: MicroBatch) -> Tensor:
        """Where the numbers of a pack's trained tokens are, in the order of its targets. [K]"""
        return torch.from_numpy(self.batch.places_K(micro.rows)).to(micro.input_ids.device)

    def _numbers(self, name: str, micro: MicroBatch) -> Tensor:
        """Those of a pack's trained tokens. [K]"""
        values_K = self.batch.numbers[name][self.batch.places_K(micro.rows)]
        return torch.from_numpy(values_K).to(micro.input_ids.device)

    def buckets(self) -> list[BucketSpec]:
        """Which of the policy's weights travel together to the engines.

        Engines on the same GPUs that slept during the update have back what it alone took of their memory.
        """
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
        return weight_transfer.plan(self.policy.packed.model)

    def bucket(self, share: BucketSpec, merge: bool = True) -> Bucket:
        """These weights of the policy, adapters merged in or left out; nothing on other ranks than the first."""
        self.policy.check_consistent()
        return self.sender.bucket(share, merge)

    def adapter(self) -> dict[str, bytes]:
        """The policy's adapter, its files by name; nothing on other ranks than the first."""
        return self.policy.adapter()

    def export(self, name: str, directory: Path, adapter: Path | None = None) -> None:
        """Write the ``policy``, its moving ``average`` or the ``critic`` as a Hugging Face folder, and what LoRA trained
        into the folder ``adapter``, if one is given."""
        average = name == "average"
        self.learners["policy" if average else name].export(directory, average, adapter)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint of this step says of itself, beside what the driver wants back."""
        updates = {name: learner.steps for name, learner in self.learners.items()}
        return {"step": self.step, "layout": self.layout(), "updates": updates}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""
        for name, learner in self.learners.items():
            learner.save(folder / name)
        if self.moving and self.rank == 0:
            self.moving.save(folder, self.step)

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


def averages(reports: Sequence[Mapping[str, StepReport]]) -> dict[str, float]:
    """Metrics from the reports of all ranks: losses over their normalisers, everything else over trained tokens."""
    metrics: dict[str, float] = {}
    for learner in reports[0]:
        ranks = [report[learner] for report in reports]
        sums = {name: sum(rank.sums.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank.sums}
        tokens = max(sums.pop("trained_tokens", 0.0), 1.0)
        normaliser = max(sum(rank.normaliser for rank in ranks), 1.0)
        prefix = "" if learner == "policy" else f"{learner}_"
        for name, value in sums.items():
            metrics[f"{prefix}{name}"] = value / (normaliser if name in ("loss", "aux_loss") else tokens)
        if ranks[0].steps:  # pretraining rows are part of the policy's steps
            metrics[f"{prefix}grad_norm"] = ranks[0].grad_norm
            metrics[f"{prefix}learning_rate"] = ranks[0].learning_rate
    return metrics
