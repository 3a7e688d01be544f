"""Models for forward passes only: references, reward models, judges, teachers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from alignment_core.cluster.device import Device, is_sharded
from alignment_core.models.flash_attention import NAME as FLASH
from alignment_core.models.flash_attention import check_flash_attention
from alignment_core.models.loading import Head
from alignment_core.models.microbatch import MicroBatch, Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel
from alignment_core.models.rank_groups import RankGroup
from alignment_core.models.sequence import sequence_group
from alignment_core.models.tensor_parallel import split, tensor_group
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.engine import close_engine, make_frozen_engine


class FrozenModel:
    """The weights of a model on this rank: all of them or, at ZeRO stage 3 and if ranks share its layers, a part. Then, and
    with groups of ranks for long sequences, it is created, called and closed on every rank at once."""

    def __init__(
        self,
        model: Model,
        head: Head,
        dtype: torch.dtype,
        resources: ResourcesConfig,
        device: Device,
        rank: int,
        world: int,
        share_prefixes: bool | None = None,
        context: int | None = None,
        has_images: bool = True,
    ) -> None:
        """``share_prefixes``: see :class:`~alignment_core.models.packed.PackedModel`; None: as ``resources.attention`` says.
        ``context`` and ``has_images`` are also explained there."""
        self.is_sharded = is_sharded(resources, world)
        self.rank = rank
        self.world = world
        self.token_budget = resources.token_budget
        self.device = device.torch_device
        sequences = sequence_group(resources.sequence_parallel_size, resources.wait_timeout_seconds)
        layers = tensor_group(resources.trainer_tensor_parallel_size, resources.wait_timeout_seconds)
        self.group: RankGroup = layers if layers.size > 1 else sequences
        """The ranks that compute each micro-batch together."""
        loaded = model.load(head, dtype, as_stored=self.is_sharded)
        if not self.is_sharded and layers.size == 1:
            loaded.to(self.device)  # before it is probed, which a processor may take minutes for
        share = resources.attention == "auto" if share_prefixes is None else share_prefixes
        flash = resources.attention == FLASH and dtype != torch.float32  # its kernel computes in half precision alone
        if flash:
            check_flash_attention(self.device)
        self.packed = PackedModel(
            loaded,
            head,
            share_prefixes=share,
            device=self.device,
            context=context,
            dtype=dtype,
            sequence_group=sequences,
            flash=flash,
            load_processor=model.image_processor,
            has_images=has_images,
            blank_images=self.is_sharded,
            layers_shared_by=layers.size,
        )
        self.packed.eval().requires_grad_(False)
        if layers.size > 1:
            split(loaded, layers)
            loaded.to(self.device)
        self._engine = None
        if self.is_sharded:
            self._engine = make_frozen_engine(self.packed, resources, dtype == torch.bfloat16, self.device)

    def packs(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        """Micro-batches of all ``rows`` or, if ranks compute them together, of this rank's. Compute those without rows, too:
        other ranks wait for them."""
        is_alone = not self.is_sharded and self.group.size == 1
        ranks, rank = (1, 0) if is_alone else self.group.share(self.world, self.rank)
        shares = self.packed.shares_prefixes
        return (pack(part, self.device, shares) for part in cut(rows, ranks, self.token_budget, shares)[rank])

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name or, if it is sharded, this rank's part of each, flattened and padded."""
        parameters: dict[str, Any] = dict(self.packed.model.named_parameters())
        return {name: p.ds_tensor if self.is_sharded else p.detach() for name, p in parameters.items()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights as :meth:`weights` gives them into the model, in its own type."""
        if self._engine is not None:
            self._engine.empty_partition_cache()  # small parameters stay whole between forward passes
        for name, own in self.weights().items():
            own.copy_(weights[name])

    def parameter(self, name: str) -> torch.nn.Parameter:
        """The parameter of a weight."""
        parameter: torch.nn.Parameter = self.packed.model.get_parameter(name)
        return parameter

    def close(self) -> None:
        """Free the memory that DeepSpeed holds."""
        if self._engine is not None:
            close_engine(self._engine, self.packed, 3)
