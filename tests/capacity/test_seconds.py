"""Seconds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import GB, Coefficients, Hardware
from alignment_core.capacity.seconds import Timing

MODEL = Architecture(
    parameters=10**9, active=10**9, embedding=0, layers=10, hidden=1000, vocabulary=1000, cache=1000, shape={}
)
HARDWARE = Hardware("round", 80 * GB, flops=1e14, bandwidth=1e12, link=100e9, network=10e9)
UNIT = Coefficients(1.0, 1.0, 1.0, 1.0, 0.0, 1e9, 1e10, 1e10)
TIMING = Timing(MODEL, HARDWARE, UNIT)


def test_a_forward_pass_is_two_operations_for_each_parameter_and_token() -> None:
    # 2 · 1e9 · 1e6 + 4 · 10 · 1000 · 500 · 1e6 = 2.02e15 operations
    assert TIMING.forward(1e6, context=500, ranks=2) == pytest.approx(2.02e15 / 2e14)


def test_a_backward_pass_is_two_forward_passes_and_recomputation_a_third() -> None:
    forward = TIMING.forward(1e6, 0, 1)
    assert TIMING.training(1e6, 0, 1, 0, recompute=False, budget=8192) == pytest.approx(3 * forward)
    assert TIMING.training(1e6, 0, 1, 0, recompute=True, budget=8192) == pytest.approx(4 * forward)


def test_communication_decides_where_micro_batches_are_small() -> None:
    # Ten micro-batches on each of 4 ranks gather 2 bytes twice and reduce 4: 8 bytes · 1e9 · 10 / 100 GB/s.
    assert TIMING.training(40 * 16, 0, 4, 3, recompute=False, budget=16) == pytest.approx(0.8)
    across_nodes = TIMING.training(160 * 16, 0, 16, 3, recompute=False, budget=16)
    assert across_nodes == pytest.approx(8.0)


def test_an_engine_reads_weights_and_cache_for_each_token() -> None:
    # 2 GB of weights, and the cache of 10 sequences of 100 + 50 tokens on average, 1,000 bytes each: 2.0015 ms a token.
    timing = replace(TIMING, coefficients=replace(UNIT, seconds_per_layer=1e-4))
    seconds = timing.sampling(prompts=0, prompt=100, completions=20, completion=100, engines=1, shards=1, at_once=10)
    assert seconds == pytest.approx(2 * 100 * (0.0020015 + 0.001))


def test_an_optimiser_in_cpu_memory_is_as_fast_as_that_memory() -> None:
    # 28 bytes at 10 GB/s, and 6 bytes over the bus at 10 GB/s, for half of the parameters.
    assert TIMING.optimiser(2, 3, offload=True) == pytest.approx(0.5e9 * 34 / 1e10)
    assert TIMING.optimiser(1, 0, offload=False) == pytest.approx(28e9 / 1e12)


def test_ranks_that_share_layers_compute_the_head_each() -> None:
    # The head has 1e6 parameters: 2 · (1e9 + 1e6) · 1e6 operations, on 2 ranks of 1e14 a second.
    assert TIMING.forward(1e6, 0, ranks=2, shards=2) == pytest.approx(2.002e15 / 2e14)


def test_gradients_are_summed_between_ranks_with_the_same_part() -> None:
    # Each of two ranks of a part holds the head and half of the rest, (1e6 + 999e6 / 2) parameters, and sends 8 bytes of each.
    count = 500.5e6
    assert TIMING.training(16, 0, 4, 1, False, budget=16, shards=2) == pytest.approx(8 * count / 100e9)
    assert TIMING.optimiser(4, 1, offload=False, shards=2) == pytest.approx(count / 2 * 28e-12 + 2 * count / 100e9)
    # With one rank for each part there is nothing to sum: 3 · 2 · (1e9 + 3 · 1e6) · 16 operations on 4 ranks.
    assert TIMING.training(16, 0, 4, 1, False, budget=16, shards=4) == pytest.approx(6 * 1.003e9 * 16 / 4e14)


def test_ranks_that_compute_a_sequence_together_exchange_heads() -> None:
    # Keys and values are 1000 bytes / 10 layers / 2 bytes / 2 = 25 wide; queries and results 1000. A rank has 250,000 tokens,
    # of which it sends three quarters: 2 bytes · 3 passes · 10 layers · 2,050 · 250,000 · 3/4 / 100 GB/s.
    seconds = TIMING.exchange_of_sequences(1e6, ranks=4, together=4, passes=3)
    assert seconds == pytest.approx(2 * 3 * 10 * 2050 * 250_000 * 0.75 / 100e9)
    assert TIMING.exchange_of_sequences(1e6, ranks=4, together=1, passes=3) == 0


def test_what_rests_is_copied_twice() -> None:
    assert TIMING.rests(5e9) == pytest.approx(1.0)
