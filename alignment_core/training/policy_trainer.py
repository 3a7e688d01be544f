"""One rank of a policy that learns from its own rewarded samples, with a critic and a reference.

The loop samples, rewards and computes advantages. An update depends only on its batch and the number of the step, so that a
resumed run needs nothing but weights, optimisers and that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device
from alignment_core.cluster.layout import LEARNERS, LearnerRole
from alignment_core.errors import NumericError, UserError
from alignment_core.inference.channels.channel import Channel, Sender
from alignment_core.inference.channels.control import Address
from alignment_core.inference.channels.ray_objects import RaySender
from alignment_core.losses.policy import aggregation_normaliser, policy_objective, top_entropy, value_objective
from alignment_core.models.loading import Head, is_text_part
from alignment_core.models.microbatch import MicroBatch, Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import run_packed
from alignment_core.models.rank_groups import RankGroup
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training.checkpoints import described
from alignment_core.training.collectives import sum_over_ranks
from alignment_core.training.frozen import FrozenModel
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.moving_reference import MovingReference
from alignment_core.training.pretraining import Pretraining
from alignment_core.training.resting import Resting, weight_storages
from alignment_core.training.schedule import learning_rate
from alignment_core.training.step_data import StepData
from alignment_core.training.step_report import StepReport


@dataclass(frozen=True)
class RlJob:
    """A training job: plain data that travels to every rank. Paths are local folders of verified artifacts."""

    section: RlConfig
    policy: Model
    critic: Model | None
    """Initial weights of the critic: a reward model, or the policy, which gets a new head."""
    seed: int
    pretraining: Path | None = None
    """The table of ``section.pretraining``."""
    reference: Model | None = None
    """Reference of the KL; None: the initial policy."""
    scratch: Path | None = None
    """Folder for rows of ``pretraining`` on disk; None: the folder for temporary files."""
    context: int | None = None
    """Maximum number of tokens of a sampled sequence."""
    masters: Path | None = None
    """fp32 master weights of ``policy``, see :mod:`alignment_core.models.masters`."""
    chat_template: str | None = None
    """Chat template of the conversations, if it is not the tokenizer's own."""
    roles: tuple[LearnerRole, ...] = LEARNERS
    """The models that these ranks hold, of those that the job has."""
    has_images: bool = True
    """Whether prompts, or rows of ``pretraining``, may have images."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> PolicyTrainer:
        """The object of one rank."""
        return PolicyTrainer(self, resources, device, rank, world)


class PolicyTrainer:
    """Policy, critic and reference on this rank, or some of them. Create it on every rank at once; its methods are
    collective."""

    def __init__(self, job: RlJob, resources: ResourcesConfig, device: Device, rank: int, world: int) -> None:
        self.job = job
        self.section = job.section
        self.resources = resources
        self.device = device
        self.rank = rank
        self.world = world
        self.learners: dict[str, Learner] = {}
        self.pretraining: Pretraining | None = None
        self.sender: Sender | RaySender | None = None
        """The open channel to the engines, on rank 0."""
        if "policy" in job.roles:
            self._add_policy()
        if "critic" in job.roles and job.critic is not None and job.section.critic is not None:
            source = self._source(job.critic, "value", head_seed=derive_seed(job.seed, "head"), follows_policy=True)
            of_critic = job.section.critic.training_of(job.section.training)
            self.learners["critic"] = Learner(source, of_critic, resources.of_model("critic"), device, rank, world)
        self.reference: Callable[..., Tensor] | None = None
        self.frozen: FrozenModel | None = None
        """The reference, if it has weights of its own."""
        self.moving: MovingReference | None = None
        if "reference" in job.roles and job.section.kl.coefficient > 0:
            self._add_reference()
        self.step = 0
        self.kl_coefficient = job.section.kl.coefficient
        self.batch: StepData
        self.critic_units = (0.0, 1.0)
        """The critic's output that is a value of 0, and the difference of outputs that is a value of 1."""
        self.rows: list[Row] = []
        """Rows of the batch."""
        self.temperature = job.section.generation.temperature
        # All but the way to the engines, which get weights while the rest is in CPU memory.
        self.resting = Resting((self.learners, self.frozen, self.moving), device.torch_device)

    def _source(self, model: Model, head: Head, **more: Any) -> ModelSource:
        adapters = derive_seed(self.job.seed, "adapters")
        job = self.job
        return ModelSource(model, head, adapter_seed=adapters, context=job.context, has_images=job.has_images, **more)

    def _add_policy(self) -> None:
        job, section = self.job, self.section
        bonus = section.loss.entropy_coef > 0
        source = self._source(
            job.policy, "lm", with_entropy=bonus, masters=job.masters, chat_template=job.chat_template
        )
        decay = section.ema.decay if section.ema else None
        self.learners["policy"] = Learner(
            source, section.training, self.resources, self.device, self.rank, self.world, decay
        )
        if is_text_part(self.policy.packed.model, job.policy.path):
            raise UserError(
                f"{job.policy.reference.short} also reads images or sounds, and `transformers` trains only the part that reads "
                "text, with whose weights a running engine of the whole model cannot be updated: start from a model that was "
                "trained before, such as by `sft`, or from one for text"
            )
        self.weights = WeightStream(self.policy.packed.model, self.rank, self.policy.zero_stage)
        if section.pretraining is not None:
            assert job.pretraining is not None, "the flow builds it"
            self.pretraining = Pretraining(section.pretraining, job.pretraining, job.seed, job.scratch)

    def _add_reference(self) -> None:
        job, training = self.job, self.section.training
        if self.section.trains_adapters_alone and job.reference is None:
            self.reference = self.policy.base  # no second copy: the policy without its adapters is the initial policy
            return
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        share = self.policy.packed.shares_prefixes if job.reference is None and "policy" in self.learners else None
        start = job.reference or replace(job.policy, bits=training.base_bits)
        resources = self.resources.of_model("reference")
        self.frozen = FrozenModel(
            start,
            "lm",
            dtype,
            resources,
            self.device,
            self.rank,
            self.world,
            share,
            job.context,
            job.has_images,
        )
        self.reference = self.frozen.packed
        if sync := self.section.kl.sync_ref_model:
            self.moving = MovingReference(self.frozen, self.policy, sync.sync_steps, sync.mixup_alpha)

    @property
    def group(self) -> RankGroup:
        """The ranks that compute each micro-batch of this one together, with all models."""
        holder = next(iter(self.learners.values()), None) or self.frozen
        assert holder is not None, "these ranks hold a model"
        return holder.group

    @property
    def policy(self) -> Learner:
        return self.learners["policy"]

    def layout(self) -> dict[str, Any]:
        """Properties that a checkpoint must share with this job."""
        layout = self.policy.layout() if "policy" in self.learners else {}
        return layout | ({"critic": self.learners["critic"].layout()} if "critic" in self.learners else {})

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Continue from a complete checkpoint, if there is one; the step, and the loop's state in the checkpoint."""
        driver: dict[str, Any] = {}
        if checkpoint is not None:
            description = described(checkpoint)
            for name, learner in self.learners.items():
                learner.restore(checkpoint / name, description["updates"][name])
            if self.moving:
                self.moving.restore(checkpoint)
            self.step = description["step"]
            driver = description["driver"]
        parameters = self.policy.parameters() if "policy" in self.learners else 0
        return {"step": self.step, "driver": driver, "parameters": parameters}

    def load(self, batch: StepData, critic_units: tuple[float, float] = (0.0, 1.0)) -> None:
        """Keep the batch of the next :meth:`update`, and the units in which the critic values it."""
        self.critic_units = critic_units
        self.batch = replace(batch, numbers=dict(batch.numbers))
        self.rows = self.batch.rows()

    def forward(self, old: bool, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Add results of forward passes to the batch on every rank: of the reference and the critic if they are here, and with
        ``old`` the policy's log-probabilities, and its tokens of high entropy if only these are trained. Rank 0 returns the
        ``wanted`` ones that are here, [K] by name.
        """
        self.resting.check_awake()
        passes: list[tuple[str, Any, bool]] = []
        policy = self.learners.get("policy")
        if old and policy:
            passes.append(("old_logps", policy.engine, policy.packed.shares_prefixes))
        if self.reference is not None:
            shares = (self.frozen or self.policy).packed.shares_prefixes
            passes.append(("reference_logps", self.reference, shares))
        if "critic" in self.learners:
            passes.append(
                ("old_values", self.learners["critic"].engine, self.learners["critic"].packed.shares_prefixes)
            )
        for learner in self.learners.values():
            learner.engine.eval()
        packs = {share: self._micro_batches(share) for share in {share for _, _, share in passes}}
        quantile = self.section.loss.top_entropy_quantile
        with_entropy = policy is not None and policy.packed.with_entropy
        for name, model, share in passes:
            columns = (name, "entropies") if name == "old_logps" and quantile < 1 else (name,)
            if policy and len(columns) > 1:
                policy.packed.with_entropy = True
            # Zero where other ranks compute, so that the sum over ranks is the whole column.
            values_CK = torch.zeros(
                len(columns), len(self.batch.numbers["rollout_logps"]), device=self.device.torch_device
            )
            for micro in packs[share]:
                with torch.no_grad():
                    output = run_packed(model, micro, self.temperature).float()
                places_K = torch.from_numpy(self.batch.places_K(micro.rows)).to(values_CK.device)
                if name == "old_values":
                    output = self._values(output)
                values_CK[:, places_K] = output[None] if output.ndim == 1 else output[: len(columns)]
            summed_CK = sum_over_ranks(values_CK, self.group.is_first)
            self.batch.numbers.update(zip(columns, summed_CK.cpu().numpy(), strict=True))
            if policy:
                policy.packed.with_entropy = with_entropy
        if "entropies" in self.batch.numbers:
            self.batch.numbers["top_entropy"] = top_entropy(self.batch.numbers.pop("entropies"), quantile)
        if self.rank != 0:
            return {}
        return {name: self.batch.numbers[name] for name in wanted if name in self.batch.numbers}

    def _micro_batches(self, share_prefixes: bool) -> list[MicroBatch]:
        """This rank's packs of the batch; every rank gets the same number."""
        if not self.rows:
            return []
        groups, number = self.group.share(self.world, self.rank)
        parts = cut(self.rows, groups, self.resources.token_budget, share_prefixes)[number]
        return [pack(part, self.device.torch_device, share_prefixes) for part in parts]

    def update(
        self, numbers: Mapping[str, np.ndarray], kl_coefficient: float, of_values: tuple[float, float] = (0.0, 1.0)
    ) -> dict[str, StepReport]:
        """All optimiser steps on the batch with further ``numbers``; a report for each learner that took steps, and for
        ``pretraining``. The critic's values are standardised by the mean and deviation ``of_values``, as its ``returns`` are.
        """
        self.resting.check_awake()
        self.batch.numbers.update(numbers)
        if "critic" in self.learners:
            (zero, one), (mean, deviation) = self.critic_units, of_values
            self.critic_units = (zero + one * mean, one * deviation)
            self.batch.numbers["old_values"] = (self.batch.numbers["old_values"] - mean) / deviation
        self.kl_coefficient = kl_coefficient
        reports: dict[str, StepReport] = {}
        for name, learner in self.learners.items():
            if self.step >= self._first_step(name):
                reports |= self._update(name, learner)
        self.end_step()
        return reports

    def end_step(self) -> None:
        """Count a step, with an update or without completions to train on."""
        self.step += 1
        if self.moving:
            self.moving.after(self.step)

    def _first_step(self, name: str) -> int:
        """The first step that trains this model: the policy may start after the critic."""
        return self.section.critic.freezing_steps if name == "policy" and self.section.critic else 0

    def _update(self, name: str, learner: Learner) -> dict[str, StepReport]:
        reports = {name: StepReport()}
        training = self.section.training
        rows = self.rows
        mixed = self.pretraining if name == "policy" else None
        if mixed:
            reports["pretraining"] = StepReport()
        rate = learning_rate(learner.training, self.step, self.section.steps, self._first_step(name))
        loss = partial(self._loss, name)
        for epoch in range(int(training.num_train_epochs)):
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

    def _loss(self, name: str, output: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective of a pack, and sums of metrics."""
        places_K = self.batch.places_K(micro.rows)
        device = micro.input_ids.device
        numbers = {
            column: torch.from_numpy(values_K[places_K]).to(device) for column, values_K in self.batch.numbers.items()
        }
        if name == "policy":
            return policy_objective(
                self.section, self.kl_coefficient, output, numbers, micro.sequence_K, micro.sequences
            )
        return value_objective(self.section, self._values(output), numbers, micro.sequence_K, micro.sequences)

    def _values(self, output_K: Tensor) -> Tensor:
        """The critic's output in units of the reward. [K] → [K]"""
        zero, one = self.critic_units
        return (output_K.float() - zero) / one

    def rest(self, keep_policy: bool = False) -> None:
        """Move all models and optimiser states to CPU memory, where they stay until :meth:`wake`; with ``keep_policy`` all but
        the policy's weights, which engines get. Raises EnvironmentFault if they do not fit there."""
        self.resting.rest(weight_storages(self.policy.packed) if keep_policy else ())

    def wake(self) -> None:
        """Move everything back that :meth:`rest` moved; call it again if the device had no memory for it."""
        self.resting.wake()

    def empty_cache(self) -> None:
        """Release the memory that the update used: engines on the same GPUs need it when they wake up."""
        torch.cuda.empty_cache()  # without CUDA this does nothing

    def open_channel(self, channel: Channel | RaySender) -> Address | None:
        """Open a channel to the engines; on rank 0 its address, if engines connect to one."""
        self._close_channel()
        if self.rank != 0:
            return None
        self.sender = channel if isinstance(channel, RaySender) else Sender(channel)
        return None if isinstance(self.sender, RaySender) else self.sender.address

    def _close_channel(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def send_weights(self, merge: bool = True) -> None:
        """Send the policy's weights through the open channel, with adapters merged in or left out; returns once all engines
        have loaded them. Rank 0 sends what it gathers from all."""
        weights = self._consistent_weights(merge)
        if self.rank == 0:
            assert self.sender is not None, "the channel is opened before"
            self.sender.send(weights)
        else:
            for _ in weights:
                pass

    def _consistent_weights(self, merge: bool) -> Iterator[tuple[str, Tensor]]:
        self.policy.check_consistent()  # in here, so that its error reaches the engines
        yield from self.weights.tensors(merge)

    def adapter(self) -> dict[str, bytes]:
        """The files of the policy's adapter by name; empty on ranks other than 0."""
        return self.policy.adapter()

    def export(self, name: str, directory: Path, adapter: Path | None = None, masters: Path | None = None) -> None:
        """Write the ``policy``, its moving ``average`` or the ``critic`` as a Hugging Face folder, and its LoRA adapter and
        master weights to the folders ``adapter`` and ``masters``, if they are given."""
        self.resting.check_awake()
        average = name == "average"
        self.learners["policy" if average else name].export(directory, average, adapter, masters)

    def describe(self) -> dict[str, Any]:
        """The description of a checkpoint of this step, without the loop's state."""
        updates = {name: learner.steps for name, learner in self.learners.items()}
        return {"step": self.step, "layout": self.layout(), "updates": updates}

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""
        self.resting.check_awake()
        for name, learner in self.learners.items():
            learner.save(folder / name)
        if self.moving:
            self.moving.save(folder, self.step)

    def close(self) -> None:
        """Free the models' memory."""
        self._close_channel()
        for learner in self.learners.values():
            learner.close()
        if self.frozen is not None:
            self.frozen.close()
        self.resting.close()


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
