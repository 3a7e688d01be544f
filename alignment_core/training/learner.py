"""One model under DeepSpeed on one rank: steps on given rows, forward passes, checkpoints that resume exactly, export.

:mod:`~alignment_core.training.trainer` and :mod:`~alignment_core.training.policy_trainer` choose the rows and losses.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from alignment_core.artifacts.os_errors import check_room
from alignment_core.artifacts.permissions import check_ours
from alignment_core.canonical import derive_seed
from alignment_core.cluster.device import Device, recomputed_activations, zero_stage
from alignment_core.errors import EnvironmentFault, NumericError, UserError
from alignment_core.models.activations import recompute
from alignment_core.models.adapters import adapters_off, add_adapters, fitting, is_adapter, merged, save_adapter
from alignment_core.models.flash_attention import NAME as FLASH
from alignment_core.models.flash_attention import check_flash_attention
from alignment_core.models.image_text import reads_images, vision_parameters
from alignment_core.models.loading import Head
from alignment_core.models.microbatch import MicroBatch, Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.neftune import embedding_noise
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.padding import set_padding
from alignment_core.models.quantization import field_of
from alignment_core.models.quantization import size as numbers_of
from alignment_core.models.rank_groups import RankGroup
from alignment_core.models.saved_stop_tokens import stop_at_turn_end
from alignment_core.models.saving import save_checkpoint, write_chat_template
from alignment_core.models.sequence import sequence_group
from alignment_core.models.tensor_parallel import gathered_state, gradient_norm, ranks_of, split, tensor_group
from alignment_core.models.tensor_shapes import FIELD as TENSOR_FIELD
from alignment_core.models.tensor_shapes import why_not_trained_in_parts
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.collectives import from_rank_0, sum_over_ranks, unanimous
from alignment_core.training.ema import WeightAverage
from alignment_core.training.engine import close_engine, fill_gradients, make_engine
from alignment_core.training.optimizers import LEAST_BYTES, make_optimizer
from alignment_core.training.portable_checkpoint import Portable
from alignment_core.training.step_report import MetricSums, StepReport

Loss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Output of the model and its micro-batch → the loss summed over it, and sums of metrics, among them ``loss``."""


@dataclass(frozen=True)
class Term:
    """A part of a step's loss: the sum over its rows on all ranks, times ``weight``, divided by ``normaliser``."""

    rows: Sequence[Row]
    loss: Loss
    normaliser: float
    report: StepReport
    """The sums of the term are added to it."""
    weight: float = 1.0
    temperature: float = 1.0
    """Temperature of the distribution over tokens whose log-probabilities the loss gets."""


@dataclass(frozen=True)
class ModelSource:
    """The model that training starts from."""

    model: Model
    head: Head
    head_seed: int | None = None
    adapter_seed: int = 0
    """Seed of the initial adapters; only with ``training.lora``."""
    with_entropy: bool = False
    dropout: bool = False
    """Whether the model's own dropout is on in training; that of LoRA adapters always is."""
    context: int | None = None
    """Tokens of the longest sequence that an engine samples with it; see :class:`~alignment_core.models.rope.RopeLengths`."""
    masters: Path | None = None
    """fp32 master weights of ``model``; None: its weights as they are stored."""
    neftune_noise_alpha: float = 0.0
    """Scale of the noise on embeddings in training; see :mod:`alignment_core.models.neftune`."""
    noise_seed: int = 0
    chat_template: str | None = None
    """Chat template of the training data, if it is not the tokenizer's own."""
    has_images: bool = True
    """Whether rows of the run may have images; without, an image-text model computes them as a model of text."""
    follows_policy: bool = False
    """Whether the training is that of a policy, which may name modules and routers that this model lacks: they are left out."""


class Learner:
    """One model with its optimiser on this rank. Create it on every rank at once; its methods are collective."""

    def __init__(
        self,
        source: ModelSource,
        training: TrainingConfig,
        resources: ResourcesConfig,
        device: Device,
        rank: int,
        world: int,
        ema_decay: float | None = None,
    ) -> None:
        """With ``ema_decay`` an exponential moving average of the weights is kept beside them."""
        self.source = source
        self.training = training
        self.resources = resources
        self.device = device
        self.rank = rank
        self.world = world
        self.zero_stage = zero_stage(resources, world)
        self.sequence_group = sequence_group(resources.sequence_parallel_size, resources.wait_timeout_seconds)
        self.tensor_group = tensor_group(resources.trainer_tensor_parallel_size, resources.wait_timeout_seconds)
        self.group: RankGroup = self.tensor_group if self.tensor_group.size > 1 else self.sequence_group
        """The ranks that compute each micro-batch of this one together."""
        if self.tensor_group.size > 1 and (
            problem := why_not_trained_in_parts(training, self.zero_stage, source.dropout)
        ):
            raise UserError(f"{TENSOR_FIELD}: {problem}")
        if self.zero_stage == 3 and (bits := training.base_bits):
            raise UserError(
                f"{field_of(bits)}: ZeRO 3 cannot shard weights in {bits} bits; set resources.zero_stage to 2 or less"
            )
        self.steps = 0
        """Optimiser steps that are in the weights."""
        self.consistent = True
        """False while a step runs, and after one that failed: its half-updated weights must not be saved."""
        self.grad_norm = 0.0
        source.model.check_changeable()
        dtype = torch.bfloat16 if training.bf16 else torch.float32
        flash = resources.attention == FLASH
        if flash:
            check_flash_attention(device.torch_device)
            if not training.bf16:
                raise UserError(
                    f"resources.attention: {FLASH} computes in half precision alone: set training.bf16, or leave it out"
                )
        # Initial adapters would be rounded to the type in which a layer is stored.
        as_stored = self.zero_stage == 3 and not training.lora
        model = replace(source.model, bits=training.base_bits).load(source.head, dtype, source.head_seed, as_stored)
        if what := recomputed_activations(resources, device, model.num_parameters()):
            recompute(model, what)
        with_images = reads_images(model)
        if training.train_vision_tower and not (with_images or source.follows_policy):
            raise UserError(
                f"training.train_vision_tower: {source.model.reference.short} reads no images; leave the field out"
            )
        self.is_partly_frozen = training.lora is not None or (with_images and not training.train_vision_tower)
        if with_images and not training.train_vision_tower:
            for parameter in vision_parameters(model):
                parameter.requires_grad_(False)
        if training.lora:
            head = model.get_output_embeddings() if source.head == "lm" else model.score
            lora = fitting(model, training.lora) if source.follows_policy else training.lora
            add_adapters(model, head, lora, source.adapter_seed, train_head=source.head != "lm")
        # `make_engine` or `split` gives each device its part of a model that may be too large for one.
        is_whole = self.zero_stage != 3 and self.tensor_group.size == 1
        if is_whole:
            model.to(device.torch_device)
        has_noise = source.neftune_noise_alpha > 0
        self.packed = PackedModel(
            model,
            source.head,
            with_entropy=source.with_entropy,
            # each row has its own noise, also on a prefix that is the same in others
            share_prefixes=resources.attention == "auto" and (self.sequence_group.size > 1 or not has_noise),
            device=device.torch_device,
            dropout=source.dropout,
            context=source.context,
            dtype=dtype,
            flash=flash,
            sequence_group=self.sequence_group,
            load_processor=source.model.image_processor,
            has_images=source.has_images,
            blank_images=self.zero_stage == 3 or (training.train_vision_tower and world > 1),
            layers_shared_by=self.tensor_group.size,
        )
        if not unanimous(self.packed.shares_prefixes, device.torch_device):
            raise EnvironmentFault(
                "resources.attention: prefix trees can be computed on some of the trainers' devices and not on others; use "
                "devices of one kind, or set it to `sdpa`"
            )
        if has_noise:
            self.packed.accept_noise()
        coefficient = training.router_aux_loss_coef
        self.router_aux_loss_coef = self.packed.router_aux_loss_coef if coefficient is None else coefficient
        if self.router_aux_loss_coef:
            try:
                self.packed.balance_routers()
            except UserError:
                if not source.follows_policy:
                    raise
                self.router_aux_loss_coef = 0.0
        if problem := from_rank_0(self._why_not_saved(), device.torch_device):
            raise UserError(problem)
        if self.tensor_group.size > 1:
            split(model, self.tensor_group)
            model.to(device.torch_device)
        optimizer = make_optimizer(self.packed, training, self.zero_stage, resources)
        # Without ZeRO and in fp32, DeepSpeed clips but does not report the norm, so gradients are clipped here.
        clips = self.zero_stage == 0 and not training.bf16
        if clips:
            optimizer.register_step_pre_hook(self._clip)
        limit = 0.0 if clips else training.max_grad_norm
        self.engine = make_engine(
            self.packed,
            optimizer,
            resources,
            self.zero_stage,
            training.bf16,
            limit,
            device.torch_device,
            self.tensor_group,
        )
        self.engine.train()  # a model is loaded in evaluation mode
        if source.masters is not None:
            self._load_masters(source.masters)
        self.average = WeightAverage(self.engine, self.zero_stage, ema_decay) if ema_decay is not None else None
        self._portable = self._portable_of() if resources.progress == "store" else None

    def _portable_of(self) -> Portable:
        return Portable(self.engine, self.zero_stage, self.tensor_group)

    def _load_masters(self, folder: Path) -> None:
        if differs := self._portable_of().load_masters(folder):
            raise UserError(
                f"{self.source.model.reference.short} names master weights of another policy ({differs.removeprefix('model.')} "
                "is not its master weight rounded to bfloat16): a stage that changes a policy must not copy its "
                "masters.json; make the model again without this file, or set `training.keep_master_weights: false` to "
                "start from its weights in bf16"
            )

    def _clip(self, *_: Any) -> None:
        """Clip gradients; the optimiser calls it before it steps, when the gradients of all ranks are added up."""
        norm = gradient_norm(self.packed.parameters(), self.tensor_group)
        self.grad_norm = float(norm)
        if self.grad_norm > self.training.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.packed.parameters(), self.training.max_grad_norm, norm)

    @property
    def counts(self) -> bool:
        """Whether this rank's sums are part of those over all ranks: the ranks of a group have the same."""
        return self.group.is_first

    def parameters(self) -> int:
        """Number of parameters of the whole model, of which this rank may hold a part."""
        return sum(_size(p) for p in self.packed.parameters())

    def base(self, *batch: Any) -> torch.Tensor:
        """A forward pass of the model without its LoRA adapters."""
        with adapters_off(self.packed):
            return self.engine(*batch)

    def step(self, terms: Sequence[Term], rate: float) -> None:
        """One optimiser step on the sum of the terms; each rank, or group of ranks, computes its own packs of their rows.

        The report of the first term also gets the numbers of the whole step. Raises NumericError on every rank where the loss
        or its gradient is not finite, or above ``training.max_loss``.
        """
        self.consistent = False
        if not self.packed.training:  # ask the model: the engine's own flag never changes
            self.engine.train()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        loss_on_rank = sum(self._backward(term, terms) for term in terms)
        # Every rank checks the same sum, so that all raise or none: one alone would leave the others waiting in a collective.
        summed = sum_over_ranks(torch.tensor([loss_on_rank], dtype=torch.float64, device=self.device.torch_device))
        loss_of_batch = float(summed)
        if not math.isfinite(loss_of_batch):
            raise NumericError(f"the loss is {loss_of_batch}")
        max_loss = self.training.max_loss
        if max_loss is not None and loss_of_batch > max_loss:
            raise NumericError(f"the loss is {loss_of_batch:.4g}, above training.max_loss {max_loss:g},")
        if self.zero_stage == 0:
            fill_gradients(self.packed)
        self.engine.step()
        report = terms[0].report
        norm = self.engine.get_global_grad_norm()  # over all ranks; infinite if NaN; None if `_clip` clips
        report.grad_norm = self.grad_norm if norm is None else float(norm)
        if not math.isfinite(report.grad_norm):
            raise NumericError("the gradient is not finite")
        if self.average is not None:
            self.average.update()
        for term in terms:
            term.report.normaliser += term.normaliser if self.rank == 0 else 0.0
        report.learning_rate = rate
        report.steps += 1
        self.steps += 1
        self.consistent = True

    def _backward(self, term: Term, terms: Sequence[Term]) -> float:
        """Add the gradient of this rank's packs of ``term``, one of the step's ``terms``; returns their part of the loss, which
        is 0 if another rank of a group counts it.

        The load-balancing loss of routers is averaged over the packs of the step, weighted by their tokens.
        """
        sums = MetricSums()
        tokens = sum(row.tokens for step_term in terms for row in step_term.rows)
        alpha = self.source.neftune_noise_alpha
        for micro in self._packs(term.rows, self.packed.shares_prefixes):
            if alpha:
                size = self.packed.model.get_input_embeddings().embedding_dim
                self.packed.noise = embedding_noise(micro, alpha, size, derive_seed(self.source.noise_seed, self.steps))
            loss_of_pack, metrics = term.loss(run_packed(self.engine, micro, term.temperature), micro)
            self.packed.noise = None
            tokens_of_pack = sum(row.tokens for row in micro.rows)
            objective = loss_of_pack * (term.weight / term.normaliser)
            if self.packed.router_loss is not None:
                aux_loss = self.packed.router_loss * (tokens_of_pack / tokens)
                objective = objective + self.router_aux_loss_coef * aux_loss
                sums.add({"aux_loss": aux_loss * terms[0].normaliser})  # metrics are divided by it later
            # DeepSpeed averages gradients over ranks; the gradient of a batch is a sum over them, also within a group, where
            # each has that by its own tokens. Ranks that share layers have it all, and DeepSpeed does not average over them.
            self.engine.backward(objective * (self.world // self.tensor_group.size))
            sums.add(metrics)
            if self.counts:
                term.report.tokens += tokens_of_pack
                term.report.computed += micro.input_ids.numel()
        if not self.counts:
            return 0.0
        metric_sums = sums.read()
        for name, value in metric_sums.items():
            report = terms[0].report if name == "aux_loss" else term.report
            report.sums[name] += value
        return term.weight * metric_sums["loss"] / term.normaliser

    def micro_batches(self, rows: Sequence[Row], share_prefixes: bool | None = None) -> list[MicroBatch]:
        """This rank's packs of ``rows`` for a forward pass; every rank gets the same number. Sums over ranks leave out those
        without ``counts``.

        Pass ``share_prefixes`` if another model computes them: whether its sequences share prefixes.
        """
        self.engine.eval()
        if not rows:
            return []
        return list(self._packs(rows, self.packed.shares_prefixes if share_prefixes is None else share_prefixes))

    def _packs(self, rows: Sequence[Row], share_prefixes: bool) -> Iterator[MicroBatch]:
        groups, number = self.group.share(self.world, self.rank)
        apart = self.source.neftune_noise_alpha > 0
        parts = cut(rows, groups, self.resources.token_budget, share_prefixes and not apart)[number]
        return (pack(part, self.device.torch_device, share_prefixes, apart) for part in parts)

    def export(
        self, directory: Path, average: bool = False, adapter: Path | None = None, masters: Path | None = None
    ) -> None:
        """Write the model, or its moving average, as a Hugging Face folder (rank 0 writes, all ranks take part).

        With LoRA its adapters are written to the folder ``adapter``, if one is given; the fp32 master weights, which are never
        averaged, to ``masters``: the exported weights are these, rounded. Raises EnvironmentFault if the disk has no room.
        """
        self.check_consistent()
        if average:
            assert self.average is not None, "the learner was made without ema_decay"
            state = self.average.state(self.packed)
        elif self.zero_stage == 3:
            # Private, because the public `save_16bit_model` writes the same weights as a pickle.
            state = self.engine._zero3_consolidated_16bit_state_dict()
        elif self.tensor_group.size > 1:
            state = gathered_state(self.packed, keep=self.rank == 0)
        else:
            state = self.packed.state_dict()
        if masters is not None and self.rank == 0:
            masters.mkdir(parents=True, exist_ok=True)
            check_room(masters, 4 * self.parameters(), f"the copy of the fp32 master weights of step {self.steps}")
        rounded: dict[str, torch.Tensor] = {}
        # Adapters are merged into the initial master weights; those of a frozen vision tower stay what they were.
        if (self.training.lora and self.source.masters) or (self.is_partly_frozen and masters):
            portable = self._portable_of()
            rounded = portable.save_merged_masters(masters, state, self.source.masters)
        elif masters:
            self._portable_of().save(masters, optimizer=False)
        if self.rank == 0:
            self._write(_in_model(state), _in_model(rounded), directory, adapter)
        torch.distributed.barrier()

    def _write(
        self,
        weights: Mapping[str, torch.Tensor],
        rounded: Mapping[str, torch.Tensor],
        directory: Path,
        adapter: Path | None,
    ) -> None:
        """Write the model; ``rounded`` are those of its weights into which adapters are merged already."""
        model, source = self.packed.model, self.source.model
        merges = {name: tensor for name, tensor in weights.items() if not (rounded and is_adapter(name))}
        state = {**merged(model, merges), **rounded}
        size = sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values())  # tied weights count once
        check_room(directory.parent, size, f"the model of step {self.steps}")
        save_checkpoint(model, source.path, directory, state, source.trust_remote_code)
        if self.source.head == "lm":
            stop_at_turn_end(directory, self.source.chat_template, source.trust_remote_code)
        else:
            if self.source.chat_template is not None:  # a judge reads all conversations as those that it was trained on
                write_chat_template(directory, self.source.chat_template)
            set_padding(directory, source.trust_remote_code)
        if adapter and self.training.lora:
            head = None if self.source.head == "lm" else "score"
            save_adapter(model, weights, self.training.lora, head, str(source.reference), adapter)

    def _why_not_saved(self) -> str | None:
        """Why the model cannot be saved, None if it can; rank 0 tries by writing it without its weights."""
        if self.rank != 0:
            return None
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._write({}, {}, Path(folder, "model"), Path(folder, "adapter"))
            except UserError as error:
                return str(error)
            except (ValueError, TypeError, RuntimeError, KeyError) as error:
                return (
                    f"{self.source.model.reference.short} cannot be trained, because `transformers` does not save it: "
                    f"{' '.join(str(error).split())}"
                )
        return None

    def adapter(self) -> dict[str, bytes]:
        """The files of the trained adapter, as :func:`save_adapter` writes them, by name; empty on ranks other than 0."""
        assert self.training.lora, "the model has no adapter"
        self.check_consistent()
        model = self.packed.model
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gathered: AbstractContextManager[Any] = nullcontext()  # collective: all ranks enter it before rank 0 writes
        if self.zero_stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([*trained.values()])
        with gathered, tempfile.TemporaryDirectory() as folder:
            if self.rank != 0:
                return {}
            base = str(self.source.model.reference)
            save_adapter(model, trained, self.training.lora, None, base, Path(folder))
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def layout(self) -> dict[str, Any]:
        """Properties that a checkpoint must share with the learner that resumes from it; a portable one, only the optimiser."""
        if self._portable is not None:
            return {"portable": self.training.optimizer}
        return {
            "world": self.world,
            "zero_stage": self.zero_stage,
            "offload_optimizer": self.resources.offload_optimizer,
            **({"tensor_parallel": size} if (size := self.tensor_group.size) > 1 else {}),
        }

    def save(self, target: Path) -> None:
        """Write weights and optimiser below ``target``. Raises EnvironmentFault if the disk has no room for them."""
        self.check_consistent()
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            self._check_room(target)
        torch.distributed.barrier()
        try:
            if self._portable is not None:
                self._portable.save(target, self.average)
                torch.distributed.barrier()
                return
            # Frozen weights are those of the initial model. `complete.json` takes the place of DeepSpeed's file `latest`.
            self.engine.save_checkpoint(str(target), tag="state", save_latest=False, exclude_frozen_parameters=True)
            if self.average is not None:
                self.average.save(target)
        except (RuntimeError, SafetensorError):
            self._check_room(target)  # these errors do not name a full disk as their reason
            raise
        torch.distributed.barrier()

    def _check_room(self, target: Path) -> None:
        trained = sum(_size(p) for p in self.packed.parameters() if p.requires_grad)
        size = (LEAST_BYTES[self.training.optimizer] + (4 if self.average else 0)) * trained
        try:
            check_room(target, size, f"the checkpoint of step {self.steps}")
        except EnvironmentFault:
            shutil.rmtree(target, ignore_errors=True)  # a partial checkpoint is useless and takes up space
            raise

    def check_consistent(self) -> None:
        """Raise NumericError after a step that failed."""
        if not self.consistent:
            raise NumericError(f"step {self.steps} failed half-way: the half-updated weights are not saved")

    def restore(self, target: Path, steps: int) -> None:
        """Read the output of :meth:`save` after ``steps`` steps. Raises EnvironmentFault if another user owns it."""
        if self._portable is not None:
            self._portable.load(target, self.average)
            self.steps = steps
            return
        check_ours(target)  # DeepSpeed unpickles it
        # Not strict with frozen weights, which are not in the checkpoint.
        strict = not self.is_partly_frozen
        loaded, _ = self.engine.load_checkpoint(str(target), tag="state", load_module_strict=strict)
        if loaded is None:
            raise NumericError(f"DeepSpeed could not read the progress checkpoint {target.name}")
        if self.average is not None:
            self.average.restore(target)
        self.steps = steps

    def close(self) -> None:
        """Free the memory that DeepSpeed holds."""
        close_engine(self.engine, self.packed, self.zero_stage)


def _in_model(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by their names in the model, without the prefix of :class:`PackedModel`."""
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _size(parameter: torch.Tensor) -> int:
    """Number of elements of the whole parameter, of which this rank may hold a part."""
    return ranks_of(parameter) * (getattr(parameter, "ds_numel", 0) or numbers_of(parameter))
