"""Bytes on one GPU for each model of a stage, by term.

Training has 2 bytes of bf16 weights for each parameter, 4 of its gradient, which accumulates in fp32, 4 of its master weight
and 8 of Adam's moments (:func:`alignment_core.training.engine.make_engine`); in fp32, 4 of weights, 4 of the gradient and 8 of
moments, and with ZeRO 4 of a copy of the weights that is stepped. ZeRO 1 splits masters and moments between the ranks, ZeRO 2
also gradients, ZeRO 3 also weights (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import Hardware
from alignment_core.init.memory import ADAPTERS, IN_4_BITS, OF_LOGITS, PLACES, RECOMPUTED, STORED, SUMMED, USABLE
from alignment_core.recipes.sections.training import TrainingConfig

GRADIENT, MASTER, AVERAGE = 4, 4, 4
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0, "paged_adamw_8bit": 2.0, "muon": 4.0, "adafactor": 0.0}
"""Bytes of a parameter's moments, by optimiser."""
BUCKET = 500_000_000
"""Most gradients that are reduced at a time, ``training.engine.LARGEST_BUCKET``: an eighth of a smaller model's. They are
summed in fp32 or, at ZeRO 3, in the type of the weights."""
LIVE = 1_000_000_000
"""Most parameters that ZeRO 3 keeps gathered: DeepSpeed's ``stage3_max_live_parameters``."""
ENGINE_RESERVE = 2 * 2**30
"""Bytes of an engine's activations and CUDA graphs, beside weights and cache."""


@dataclass(frozen=True)
class Role:
    """Bytes of a model on one GPU."""

    name: str
    ranks: int
    terms: dict[str, float]
    """Bytes by term: weights, gradients, optimiser, buffers, activations, logits, cache."""
    host: float = 0.0
    """Bytes in the CPU memory of its machine for each rank."""

    @property
    def resident(self) -> float:
        """Bytes that stay on the GPU between passes."""
        return sum(size for term, size in self.terms.items() if term not in PASSING)

    @property
    def passing(self) -> float:
        """Further bytes during a pass."""
        return sum(self.terms.get(term, 0.0) for term in PASSING)


DIVIDED = 24
"""Of ``STORED``, the bytes that are divided among ranks that share layers."""
PASSING = ("activations", "logits", "gathered")
"""Terms that exist during a pass only."""


@dataclass(frozen=True)
class Peak:
    """The moment at which a GPU of a group holds most."""

    where: str
    """The model whose GPUs these are, which may hold others, too."""
    moment: str
    parts: dict[str, float]
    """Bytes by model."""
    capacity: float
    """Usable bytes."""

    @property
    def size(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.size <= self.capacity


def usable(hardware: Hardware) -> float:
    """Bytes of a GPU that are counted on; CUDA, NCCL and fragmentation take the rest."""
    return USABLE * hardware.memory


def trained(
    name: str,
    model: Architecture,
    training: TrainingConfig,
    ranks: int,
    stage: int,
    offload: bool,
    recompute: bool,
    tokens: int,
    shards: int = 1,
    has_average: bool = False,
) -> Role:
    """A model that is trained by ``ranks`` at this ZeRO ``stage`` in micro-batches of so many ``tokens``. Groups of ``shards``
    ranks share its linear layers. ``has_average``: beside a moving average of its weights in fp32."""
    size = 2 if training.bf16 else 4
    lora = training.lora
    trains_tower = training.train_vision_tower and not lora
    count = model.parameters * ADAPTERS if lora else model.of_rank(shards) + (model.tower if trains_tower else 0)
    frozen = (model.parameters * _bits(lora.base_bits, size)) if lora else 0.0
    frozen += 0.0 if trains_tower else float(model.tower * size)
    split = [shards / ranks if stage >= least else 1.0 for least in (1, 2, 3)]
    master = MASTER if training.bf16 or stage else 0
    average = AVERAGE if has_average else 0
    optimiser = count * (master + MOMENTS[training.optimizer] + average) * split[0]
    gradients = count * GRADIENT * split[1]
    bucket = min(BUCKET, count / 8) * (size if stage == 3 else GRADIENT) if stage else 0.0
    terms = {
        "weights": (count * size + frozen) * split[2],
        "gradients": 0.0 if offload else gradients,
        "optimiser": 0.0 if offload else optimiser,
        "buffers": bucket,
        **_passing(model, tokens, recompute, size, ranks, stage, lora is None and training.bf16, shards),
    }
    return Role(name, ranks, terms, host=optimiser + gradients if offload else 0.0)


def frozen(
    name: str, model: Architecture, ranks: int, is_split: bool, offload: bool, tokens: int, shards: int = 1
) -> Role:
    """A model that is not trained, in bf16: a reference, a reward model, a teacher. ``is_split``: between its ranks;
    ``shards``: as in :func:`trained`."""
    weights = 2.0 * (model.of_rank(shards) + model.tower) / (ranks if is_split else 1)
    logits = model.vocabulary * PLACES * OF_LOGITS / 2
    passing = {"activations": float(tokens * model.hidden * _stored(shards)), "logits": logits}
    if is_split:
        passing["gathered"] = 2.0 * min(LIVE, model.parameters)
    return Role(name, ranks, {"weights": 0.0 if offload else weights, **passing}, host=weights if offload else 0.0)


def engine(
    model: Architecture, hardware: Hardware, tensor_parallel: int, utilization: float, ranks: int, name: str = "engines"
) -> Role:
    """An engine on each of its GPUs: vLLM takes the fraction ``utilization`` of the memory, weights and cache together."""
    weights = 2.0 * (model.parameters + model.tower) / tensor_parallel
    return Role(
        name,
        ranks,
        {
            "weights": weights,
            "reserve": ENGINE_RESERVE,
            "cache": utilization * hardware.memory - weights - ENGINE_RESERVE,
        },
    )


def _stored(shards: int) -> float:
    """Bytes of a layer's activations for each token and unit of the hidden size: 24 of 34 are those of attention and MLP, which
    are divided among ``shards`` ranks (Korthikanti et al. 2022, equation 2)."""
    return STORED - DIVIDED + DIVIDED / shards


def _passing(
    model: Architecture, tokens: int, recompute: bool, size: int, ranks: int, stage: int, summed: bool, shards: int
) -> dict[str, float]:
    of_layers = (RECOMPUTED * model.layers if recompute else 0) + _stored(shards) * (1 if recompute else model.layers)
    logits = model.vocabulary * (PLACES * OF_LOGITS + (SUMMED * 2 if summed else 0))
    passing = {"activations": tokens * model.hidden * of_layers * size / 2, "logits": float(logits)}
    if stage == 3 and ranks > 1:
        passing["gathered"] = float(size) * min(LIVE, model.parameters)
    return passing


def _bits(bits: int | None, size: int) -> float:
    return {4: IN_4_BITS, 8: 1.1}.get(bits or 0, float(size))
