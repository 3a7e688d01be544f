"""Updates the weights of a running vLLM worker. vLLM mixes this class into its own worker (``worker_extension_cls``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from alignment_core.errors import PeerFailed
from alignment_core.inference.channels.buckets import Assembler, Bucket, from_bucket
from alignment_core.inference.channels.channel import Channel, Receiver, free_gpu_memory
from alignment_core.inference.channels.control import Address
from alignment_core.inference.channels.deltas import DeltaDecoder
from alignment_core.models.saving import check_loadable, weight_files


class WeightUpdate:
    """Methods that the engine calls on every worker of vLLM by ``collective_rpc``.

    vLLM packs weights for its kernels and, on the CPU, empties the originals, so that ``load_weights`` alone would fail. A
    layerwise reload restores the original shapes, and packs each layer once all of its weights are loaded.
    """

    model_runner: Any
    vllm_config: Any
    missing: set[str]
    """Parameters that the current update has not loaded yet."""
    assembler: Assembler
    receiver: Receiver | None = None
    """The open channel from the trainers."""
    delta_decoder: DeltaDecoder | None = None
    """Puts whole tensors together from buckets with deltas."""
    has_deltas: bool
    """Whether the buckets of the current update have deltas."""
    wrappers: list[tuple[Any, str, Any]]
    """Layers that can have adapters, which are removed from the model during an update: (parent, name, layer)."""

    def adapts_experts(self) -> bool:
        """Whether adapters can be added to experts of a mixture."""
        layers = self.model_runner.get_model().modules()
        return any("MoE" in type(layer).__name__ and hasattr(layer, "base_layer") for layer in layers)

    def load_checkpoint(self, model: str) -> None:
        """Replace all weights by those of the folder ``model`` (safetensors, same architecture)."""
        self.begin_update()
        self._load(_stored(model))
        self.end_update()

    def begin_update(self) -> None:
        """Prepare for all weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        self.wrappers = _unwrapped(model)
        self.missing = {name for name, _ in model.named_parameters()}
        self.assembler = Assembler()
        self.has_deltas = False
        _pack_experts_again(model)
        with set_current_vllm_config(self.vllm_config):  # operators read the current configuration
            initialize_layerwise_reload(model)

    def begin_delta(self) -> str | None:
        """Expect deltas in the buckets of this update; returns the version of the last one that came so."""
        if self.delta_decoder is None:
            self.delta_decoder = DeltaDecoder()
        self.has_deltas = True
        return self.delta_decoder.begin()

    def load_bucket(self, bucket: Bucket) -> str | None:
        """Load some of the weights; a layer is replaced as soon as all of its weights are loaded. Failures: see
        :meth:`receive_weights`."""
        weights: Iterable[tuple[str, Any]] = from_bucket(self.assembler, bucket)
        if self.has_deltas:
            assert self.delta_decoder is not None, "begin_delta makes it"
            weights = self.delta_decoder.decode(weights)
        try:
            self._load(weights)
        except PeerFailed as error:
            return str(error)
        return None

    def node(self) -> str | None:
        """Ray's id of the node that this worker is on; None for a process of the engine's own, which is on its node."""
        ray = sys.modules.get("ray")
        return ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else None

    def free_memory(self) -> int:
        """Bytes of free memory of this worker's GPU."""
        return free_gpu_memory()

    def open_channel(self, channel: Channel, address: Address) -> None:
        """Connect to the trainers, which send weights through the channel from now on."""
        self.close_channel()
        self.receiver = Receiver(channel, address)

    def close_channel(self) -> None:
        """Close the channel, if one is open, and drop the copy that deltas apply to."""
        self.delta_decoder = None
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def receive_weights(self) -> str | None:
        """Load all weights that come through the channel. The failure of a peer is returned, as a sentence: of an error in a
        worker process vLLM tells the engine no more than its text."""
        assert self.receiver is not None, "the channel is opened before"
        try:
            with self.receiver.receiving() as weights:
                self._load(weights)
        except PeerFailed as error:
            return str(error)
        return None

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.missing -= self.model_runner.get_model().load_weights(weights)

    def end_update(self) -> None:
        """Use the new weights. Raises RuntimeError if some are missing: vLLM would continue with the old ones."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        _share_packed_embedding(model)
        for parent, name, wrapper in self.wrappers:
            parent._modules[name] = wrapper
        if self.missing:
            raise RuntimeError(f"a weight update had no weights for {', '.join(sorted(self.missing))}")


def _unwrapped(model: Any) -> list[tuple[Any, str, Any]]:
    """Replace each layer that adds adapters by its inner layer, whose name is the one in checkpoints."""
    wrappers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if hasattr(layer, "base_layer")
    ]
    for parent, name, layer in wrappers:
        parent._modules[name] = layer.base_layer
    return wrappers


def _stored(model: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in weight_files(check_loadable(Path(model))):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)


def _pack_experts_again(model: Any) -> None:
    """Let vLLM pack the experts of a mixture again: on the CPU they are packed when their kernel is made, and an old kernel
    would read the new weights as if they were packed."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _share_packed_embedding(model: Any) -> None:
    """Let a tied ``lm_head`` compute with the copy that was packed from the new embedding: on the CPU it has one of its own,
    which only loading it would replace."""
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    for head in packed:
        if type(head).__name__ == "ParallelLMHead":
            for tied in packed:
                if tied is not head and tied.weight is head.weight:
                    head.cpu_linear = tied.cpu_linear
