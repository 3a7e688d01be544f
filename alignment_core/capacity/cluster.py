"""GPUs of one kind with the models of a recipe, and what a pass of one of these models takes on some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import Coefficients, Hardware
from alignment_core.capacity.seconds import Timing
from alignment_core.cluster.device import Device, recomputed_activations
from alignment_core.init.memory import ADAPTERS
from alignment_core.models.prefix_tree import LEAST_SHARED
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.recipes.sections.model import ModelConfig


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, and the models of a recipe on them."""

    hardware: Hardware
    gpus: int
    model: Architecture
    """The policy's."""
    coefficients: Coefficients = field(default_factory=Coefficients)
    others: Mapping[str, Architecture | None] = field(default_factory=dict)
    """Those of other models of the recipe, by name; None where a config.json does not give the size."""

    @property
    def timing(self) -> Timing:
        return self.timing_of(self.model)

    def timing_of(self, model: Architecture) -> Timing:
        return Timing(model, self.hardware, self.coefficients)

    def architecture(self, model: ModelConfig | None) -> Architecture:
        """That of a model of the recipe; the policy's if it is None, or not known."""
        if model is None:
            return self.model
        if model.scratch is not None:
            return Architecture.of(model.scratch.model_dump())
        return self.others.get(str(model.name)) or self.model

    def assumed(self, models: Mapping[str, ModelConfig]) -> list[str]:
        """Sentences about models whose size is not known, by their field in the recipe."""
        return [
            f"{field}: {model.name} is taken to be as large as the policy, because its config.json "
            + ("does not give its size in fields known here" if str(model.name) in self.others else "was not found")
            for field, model in models.items()
            if model.scratch is None and self.others.get(str(model.name)) is None
        ]

    @property
    def device(self) -> Device:
        whole, rest = divmod(self.gpus, self.hardware.per_node)
        nodes = (*[self.hardware.per_node] * whole, *([rest] if rest else []))
        return Device("cuda", self.gpus, private=False, nodes=nodes)


@dataclass(frozen=True)
class Passes:
    """Passes of a model over rows, on ranks as ``resources`` place them."""

    timing: Timing
    resources: ResourcesConfig
    ranks: int
    stage: int
    budget: int
    """Tokens of a micro-batch on each rank."""
    recompute: bool = False

    def forward(self, tokens: float, context: float) -> float:
        """Seconds of a pass without gradient over so many tokens."""
        shards = self.resources.trainer_tensor_parallel_size
        seconds = self.timing.forward(tokens, context, self.ranks, self.stage == 3, self.budget, shards)
        return seconds + self._exchange(tokens, 1)

    def training(self, tokens: float, context: float, trained: float) -> float:
        """Seconds of a pass forward and back."""
        shards = self.resources.trainer_tensor_parallel_size
        seconds = self.timing.training(
            tokens, context, self.ranks, self.stage, self.recompute, self.budget, trained, shards
        )
        return seconds + self._exchange(tokens, 2 + self.recompute)

    def optimiser(self, offload: bool, trained: float) -> float:
        """Seconds of a step of the optimiser."""
        shards = self.resources.trainer_tensor_parallel_size
        return self.timing.optimiser(self.ranks, self.stage, offload, trained, shards)

    def _exchange(self, tokens: float, passes: int) -> float:
        shards, together = self.resources.trainer_tensor_parallel_size, self.resources.sequence_parallel_size
        return self.timing.exchange(tokens, self.ranks, shards, passes) + self.timing.exchange_of_sequences(
            tokens, self.ranks, together, passes
        )


def of_one_rank(tokens: int, resources: ResourcesConfig) -> int:
    """Tokens of a micro-batch that each rank of a group holds."""
    return -(-tokens // resources.sequence_parallel_size)


def shares_prefix(resources: ResourcesConfig, cluster: Cluster, prefix: int) -> bool:
    """Whether a common prefix of so many tokens is computed once; rows with images are computed one by one."""
    return resources.attention == "auto" and not cluster.model.tower and prefix >= LEAST_SHARED


def recomputes(resources: ResourcesConfig, cluster: Cluster, model: Architecture | None = None) -> bool:
    parameters = (model or cluster.model).parameters
    return recomputed_activations(resources, cluster.device, parameters) == "all"


def trained_fraction(training: TrainingConfig) -> float:
    return ADAPTERS if training.lora else 1.0
