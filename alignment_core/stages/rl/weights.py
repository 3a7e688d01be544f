"""The way of the policy's weights from the trainer ranks to the engines: all of them, or its adapter alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup, wait_together
from alignment_core.cluster.ray_cluster import is_private, node_address
from alignment_core.environments.episode import version_of
from alignment_core.errors import UserError
from alignment_core.execution.base import StageContext
from alignment_core.inference.channels.channel import Channel, free_gpu_memory, gpu_bucket_bytes
from alignment_core.inference.channels.ray_objects import RaySender
from alignment_core.inference.engine import Engine
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training.policy_groups import PolicyGroups
from alignment_core.training.policy_trainer import PolicyTrainer

Kind = Literal["memory", "broadcast", "ray"]


class WeightSync:
    """Gives the engines the policy's weights. Call it while they sample nothing."""

    def __init__(
        self,
        context: StageContext,
        section: RlConfig,
        engines: ActorGroup[Engine],
        ranks: PolicyGroups,
        policy: str,
    ) -> None:
        """``policy`` is the name of the policy before the first step."""
        self.context = context
        self.section = section
        self.engines = engines
        self.ranks = ranks
        self.policy = policy
        lora = section.training.lora
        self.sends_adapter = lora is not None and context.resources.max_lora_rank is not None and lora.is_addable
        """Whether the engines get the policy's adapter instead of all weights."""
        self.engines_have_start = False
        """Whether they got the weights of the initial policy from here."""
        self.channel: Kind | None = None
        """The kind of the open channel."""

    def send(self, step: int) -> None:
        """Give the engines the weights after so many steps."""
        self.ranks.empty_cache()
        self.ranks.rest(keep_policy=True)
        # An adapter lies on the initial weights, also after a resume; warm engines may hold those of another stage.
        if step == 0 or (self.sends_adapter and not self.engines_have_start):
            self._send_start(adapter_follows=step > 0)
        if step and self.sends_adapter:
            self._send_adapter(step)
        elif step:
            self._send_weights(step)

    def close(self) -> None:
        """Close the channel on the engines' side; the trainers close theirs with their models."""
        if self.channel is not None:
            self.engines.all(Engine.close_channel)
        self.channel = None

    def _send_start(self, adapter_follows: bool) -> None:
        """Load the initial policy into the engines; a quantized policy comes from the trainers, which alone quantized it."""
        if self.section.training.base_bits:
            self._send_weights(0, merge=False, adapter_follows=adapter_follows)
        else:
            if not adapter_follows:
                self.ranks.rest()
            self.engines.all(Engine.load, self.context.inputs["policy"], self.policy, adapter_follows)
        self.engines_have_start = True

    def _send_weights(self, step: int, merge: bool = True, adapter_follows: bool = False) -> None:
        """Send all weights, with adapters merged in unless told otherwise: begin, send, finish."""
        self.channel = self.channel or self._opened()
        trainers = self.ranks.policy
        if self.channel == "ray":
            self.engines.all(Engine.begin_update)
            trainers.all(PolicyTrainer.send_weights, merge)
        else:
            receiving = self.engines.started(Engine.receive_weights)
            try:
                wait_together(receiving, trainers.started(PolicyTrainer.send_weights, merge))
            except Exception:
                if self.channel == "memory" and self.context.machines.actors.device.kind == "cuda":
                    trainers.discard()  # a dead engine never releases the buffers of rank 0's GPU that it has mapped
                raise
        if not adapter_follows:
            self.ranks.rest()  # before the engines allocate their cache
        self.engines.all(Engine.end_update, version_of(self.policy, step), step, adapter_follows)

    def _opened(self) -> Kind:
        """Open a channel on both sides."""
        trainers = self.ranks.policy
        resources = self.context.resources
        nodes = [node for of_engine in self.engines.all(Engine.nodes) for node in of_engine]
        kind = self._kind(nodes)
        sends_deltas = resources.weight_update_mode == "delta"
        if kind == "ray":
            sender = RaySender(
                self.engines.actors,
                Engine.load_bucket.__name__,
                resources.wait_timeout_seconds,
                call(Engine.begin_delta) if sends_deltas else None,
            )
            trainers.all(PolicyTrainer.open_channel, sender)
            return kind
        device = self.context.machines.actors.device
        on_gpus = device.engines_apart(resources) if kind == "broadcast" else device.kind == "cuda"
        channel = Channel(
            kind,
            receivers=len(nodes),
            seconds=resources.wait_timeout_seconds,
            host="127.0.0.1" if kind == "memory" or is_private() else trainers.run_on([0], node_address)[0],
            on_gpus=on_gpus,
            bucket_bytes=self._gpu_bucket_bytes() if on_gpus else 0,
            sends_deltas=sends_deltas,
        )
        address = trainers.all(PolicyTrainer.open_channel, channel)[0]
        assert address is not None, "rank 0 listens"
        self.engines.all(Engine.open_channel, channel, address)
        return kind

    def _gpu_bucket_bytes(self) -> int:
        """Size of a bucket that rank 0's GPU and those of the engines have room for."""
        of_engines = self.engines.all(Engine.free_memory)
        return gpu_bucket_bytes([*self.ranks.policy.run_on([0], free_gpu_memory), *chain.from_iterable(of_engines)])

    def _kind(self, nodes: Sequence[str]) -> Kind:
        """The recipe's kind; by default ``memory`` if all engines, on these ``nodes``, are on that of rank 0, and else
        ``broadcast``.

        Raises UserError for ``memory`` across nodes.
        """
        wanted = self.context.resources.weight_transfer
        if wanted in ("broadcast", "ray"):
            return wanted
        is_one_node = {*nodes} == {self.ranks.policy.nodes()[0]}
        if wanted == "memory" and not is_one_node:
            raise UserError(
                "resources.weight_transfer: memory needs all engines on the node of the first trainer: use auto, or broadcast"
            )
        return "memory" if is_one_node else "broadcast"

    def _send_adapter(self, step: int) -> None:
        """Send the adapter; the engines already hold the weights below it."""
        self.ranks.policy.pass_on(call(PolicyTrainer.adapter), self.engines, Engine.load_adapter)
        self.ranks.rest()
        self.engines.all(Engine.use_adapter, version_of(self.policy, step), step)
