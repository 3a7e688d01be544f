"""The memory of training, counted by the model's shape before anything runs: what a recipe trains, and in which pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from alignment_core.init.machine import Machine
from alignment_core.init.models import Model
from alignment_core.machine_memory import GIB

WEIGHTS = 2
"""Bytes of a parameter in bf16, on every GPU."""
OF_ADAMW = 16
"""Further bytes of a trained parameter: gradient, master weight and two moments in fp32, which ZeRO 2 splits between GPUs."""
ADAPTERS = 0.01
"""Parameters of adapters of rank 16 for each of the model."""
IN_4_BITS = 0.8
"""Bytes of a parameter in NF4, with embeddings and scales in bf16."""
STORED, RECOMPUTED = 34, 2
"""Bytes for each layer and unit of the hidden size that a token's activations take until the backward pass; with checkpointing
the layer's input alone, and one layer in full (Korthikanti et al. 2022, Reducing Activation Recomputation, equation 1)."""
PLACES = 256
"""Tokens whose logits are in memory at a time: `models.vocabulary_head.PLACES`."""
OF_LOGITS = 16
"""Bytes for each of these tokens and word of the vocabulary: logits in bf16 and fp32, their log-softmax, and both gradients."""
SUMMED = 2048
"""Tokens whose gradients by logits are in memory if the head is trained in bf16: `models.vocabulary_head.SUMMED`."""
USABLE = 0.9
"""Share of a GPU's memory that is counted on; CUDA, NCCL and fragmentation take the rest."""
CACHE = 0.1
"""Least share of a GPU's memory for an engine's key-value cache and activations."""
BUCKETS = GIB
"""Bytes on the way from a trainer to an engine."""
ENOUGH = 0.7
"""Share of a GPU's memory beyond which an engine gets no more than it needs, so that judges have room, too."""
LARGE = 1_500_000_000
"""Parameters from which on activations are recomputed even where they would fit."""
BUDGETS = (16384, 8192, 4096, 2048)
"""Token budgets of a micro-batch; the first one is that of OpenRLHF's scripts for GPUs of 80 GB."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json with the number of experts in a layer."""
OF_TRAINER = GIB
"""Bytes of a process that trains on a CPU, beside what is counted: libraries, temporary tensors and what is freed and kept."""
STATE = {2: 16, 4: 12}
"""Bytes of a trained parameter, by those of its weight: gradient and two moments in fp32, and for
bf16 the master weight."""
ON_CPU = 2048
"""Tokens of a micro-batch on a CPU, by default."""
SHARE_ON_CPU = 0.6
"""Share of a computer's memory for training; engines, the store and other programs need the rest."""
Trained = Literal["all weights", "adapters", "adapters beside 4 bits"]


@dataclass(frozen=True)
class Fit:
    """How a model is trained on a GPU of this machine. Bytes are those of one GPU."""

    trained: Trained
    checkpointing: bool
    budget: int
    """Tokens of a micro-batch."""
    state: int
    """Bytes of weights, gradients and moments."""
    activations: int
    engine: float | None
    """`gpu_memory_utilization`; None if no engine fits beside the trainer."""
    fits: bool

    @property
    def words(self) -> str:
        return f"{self.state / GIB:.1f} GiB of weights and optimiser and {self.activations / GIB:.1f} of activations"


def fit(machine: Machine, model: Model, longest: int, shares: bool) -> Fit | None:
    """The first way to train that fits, from all weights to adapters beside weights in 4 bits; otherwise the last one. None
    without a GPU, or for a model of unknown size.

    ``longest`` is the number of tokens of the longest row, of all its sequences, and ``shares`` whether trainer and engine take
    turns with the GPU's memory, as in reinforcement learning: each has it for itself, except that the weights of both are there
    when the engine gets new ones.
    """
    count, shape = model.parameters, model.shape.get("text_config") or model.shape
    hidden, layers, vocabulary = (shape.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    if not (machine.gpus and count and hidden and layers and vocabulary):
        return None
    memory = machine.memory // machine.gpus
    states: dict[Trained, float] = {
        "all weights": count * (WEIGHTS + OF_ADAMW / machine.gpus),
        "adapters": count * (WEIGHTS + ADAPTERS * (WEIGHTS + OF_ADAMW)),
        "adapters beside 4 bits": count * (IN_4_BITS + ADAPTERS * (WEIGHTS + OF_ADAMW)),
    }
    if any(shape.get(name) for name in EXPERTS):
        del states["adapters beside 4 bits"]  # only linear layers are quantised, and transformers 5 fuses experts
    is_large = count >= LARGE
    weights: dict[Trained, float] = {
        trained: count * (IN_4_BITS if trained == "adapters beside 4 bits" else WEIGHTS) for trained in states
    }
    fits = False
    for trained, checkpointing, budget in itertools.product(states, (True,) if is_large else (False, True), BUDGETS):
        of_layers = RECOMPUTED * layers + STORED if checkpointing else STORED * layers
        of_logits = _of_logits(vocabulary, summed=trained == "all weights")
        activations = max(budget, longest) * hidden * of_layers + of_logits
        state = int(states[trained])
        needed = math.ceil(20 * (count * WEIGHTS / memory + CACHE)) / 20
        engine = max(ENOUGH, needed)
        transfer = weights[trained] + count * WEIGHTS + BUCKETS if shares else 0
        samples = max(engine * memory, transfer) <= USABLE * memory
        fits = state + activations <= USABLE * memory and (samples or not shares)
        if fits:
            break
    return Fit(trained, checkpointing, budget, state, activations, engine if samples else None, fits)


def _of_logits(vocabulary: int, summed: bool) -> int:
    """Bytes of logits and of gradients by them; ``summed``: with those that are kept for the weights' gradient in bf16."""
    return vocabulary * (PLACES * OF_LOGITS + (SUMMED * 2 if summed else 0))


@dataclass(frozen=True)
class FitOnCpu:
    """How a model is trained where there is no GPU."""

    lora: bool
    needed: int
    """Bytes to train all weights."""


def fit_on_cpu(machine: Machine, model: Model, longest: int) -> FitOnCpu | None:
    """All weights if they fit, otherwise adapters. None with a GPU, or for a model of unknown size.

    A token's activations are the outputs of a layer's matrix products and of its attention; all else is recomputed there
    (`gradient_checkpointing: selective`): 5 H for queries, attention, output, the end of the MLP and the layer's input, 2 H·k/n
    for k key-value heads of n, and twice the MLP's inner size.
    """
    count, shape = model.parameters, model.shape.get("text_config") or model.shape
    if machine.gpus or not count:
        return None
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    inner = shape.get("intermediate_size") or shape["moe_intermediate_size"]
    size = 2 if machine.cpu_multiplies_bf16 else 4
    of_layer = 5 * hidden + 2 * hidden * (shape.get("num_key_value_heads") or heads) // heads + 2 * inner
    activations = max(ON_CPU, longest) * shape["num_hidden_layers"] * of_layer * size
    logits = _of_logits(shape.get("vocab_size", 0), summed=size == 2)
    needed = OF_TRAINER + count * (size + STATE[size]) + activations + logits
    return FitOnCpu(needed > SHARE_ON_CPU * machine.memory, needed)
