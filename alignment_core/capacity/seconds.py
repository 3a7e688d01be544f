"""Seconds of the parts of a step: the larger one of computation and communication or, in sampling, of reading memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import Coefficients, Hardware

ADAM_BYTES = 28
"""Bytes that AdamW reads and writes for a parameter: it reads gradient, master and two moments, and writes the last three."""


@dataclass(frozen=True)
class Timing:
    """A model on GPUs of one kind."""

    model: Architecture
    hardware: Hardware
    coefficients: Coefficients

    def forward(
        self, tokens: float, context: float, ranks: int, is_split: bool = False, budget: int = 8192, shards: int = 1
    ) -> float:
        """A pass over all these tokens, spread over the ranks, in micro-batches of ``budget`` tokens."""
        flops = self.model.forward_flops(tokens, context, shards)
        compute = flops / (ranks * self.hardware.flops * self.coefficients.forward)
        gathers = 2.0 * self.model.parameters * self._micro_batches(tokens, ranks, budget) if is_split else 0.0
        return max(compute, gathers / self._rate(ranks))

    def training(
        self,
        tokens: float,
        context: float,
        ranks: int,
        stage: int,
        recompute: bool,
        budget: int,
        trained: float = 1.0,
        shards: int = 1,
    ) -> float:
        """Forward and backward passes over all these tokens at a ZeRO ``stage``. A backward pass takes two forward passes, one
        for the gradients of activations and one for those of weights, and a third to recompute activations. ``trained``: the
        fraction of the parameters that has gradients, almost none with adapters. Groups of ``shards`` ranks share the layers,
        and gradients are summed between those that hold the same part."""
        works = 1 + 1 + trained + recompute
        flops = self.model.forward_flops(tokens, context, shards) * works
        compute = flops / (ranks * self.hardware.flops * self.coefficients.training)
        if ranks == shards:
            return compute
        count = self.model.of_rank(shards)
        micro_batches = self._micro_batches(tokens, ranks // shards, budget)
        if stage == 3:  # weights for both passes, and the sum of the gradients
            sent = (2 * 2 + 4 * trained) * count * micro_batches
        elif stage == 2:
            sent = 4 * trained * count * micro_batches
        else:
            sent = 2 * 4 * trained * count
        return max(compute, sent / self._rate(ranks))

    def exchange(self, tokens: float, ranks: int, shards: int, passes: int) -> float:
        """Sums of the activations of all these tokens in bf16 by ``shards`` ranks that share layers: one for attention and one
        for the MLP in each layer and each of the ``passes``, forward, backward or recomputed. Nothing hides them."""
        sums = 2 * passes * self.model.layers * self.model.hidden * tokens * shards / ranks
        return 2 * sums * 2 * (shards - 1) / shards / self._rate(shards)

    def exchange_of_sequences(self, tokens: float, ranks: int, together: int, passes: int) -> float:
        """Exchanges between ``together`` ranks that compute a sequence together: in each layer and pass every rank sends
        queries, keys, values and the results of attention of its tokens in bf16, but for its own part (DeepSpeed Ulysses,
        Jacobs et al. 2023, section 3.1). Nothing hides them."""
        width = 2 * self.model.hidden + 2 * self.model.key_values
        sent = 2 * passes * self.model.layers * width * tokens / ranks
        return sent * (together - 1) / together / self._rate(together)

    def optimiser(self, ranks: int, stage: int, offload: bool, trained: float = 1.0, shards: int = 1) -> float:
        """A step of AdamW, and the exchange of the new weights."""
        count, replicas = self.model.of_rank(shards) * trained, ranks // shards
        mine = count / (replicas if stage else 1)
        exchange = 2 * count / self._rate(ranks) if replicas > 1 and 0 < stage < 3 else 0.0
        if not offload:
            return mine * ADAM_BYTES / self.hardware.bandwidth + exchange
        moved = mine * (4 + 2) / self.coefficients.pcie
        return mine * ADAM_BYTES / self.coefficients.host + moved + exchange

    def sampling(
        self,
        prompts: float,
        prompt: float,
        completions: float,
        completion: float,
        engines: int,
        shards: int,
        at_once: int,
    ) -> float:
        """``completions`` of ``completion`` tokens for ``prompts`` of ``prompt`` tokens, on engines over ``shards`` GPUs that
        sample ``at_once`` each. A prompt is read once, however many completions it has."""
        hardware, coefficients = self.hardware, self.coefficients
        of_engine = completions / engines
        running = min(at_once, of_engine)
        rounds = of_engine / running
        speed = shards * hardware.flops * coefficients.prefill
        read = 2.0 * (self.model.active - self.model.embedding) + running * self.model.cache * (prompt + completion / 2)
        memory = read / (shards * hardware.bandwidth)
        compute = self.model.forward_flops(running, prompt + completion / 2) / (shards * hardware.flops)
        of_token = max(memory, compute) / coefficients.decoding + self.model.layers * coefficients.seconds_per_layer
        prefill = self.model.forward_flops(prompts / engines * prompt, prompt / 2) / speed
        return prefill + rounds * completion * of_token

    def rests(self, size: float) -> float:
        """So many bytes of each rank go to pinned CPU memory and come back."""
        return 2 * size / self.coefficients.pcie

    def transfer(self, bytes_per_number: int = 2) -> float:
        """New weights for all engines."""
        return self.model.parameters * bytes_per_number / self.coefficients.transfer

    def _micro_batches(self, tokens: float, ranks: int, budget: int) -> int:
        return max(1, math.ceil(tokens / ranks / budget))

    def _rate(self, ranks: int) -> float:
        return self.hardware.link if ranks <= self.hardware.per_node else self.hardware.network
