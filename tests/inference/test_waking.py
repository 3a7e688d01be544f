"""An engine that gets its memory of a GPU back, or does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment_core.errors import EnvironmentFault
from alignment_core.inference.engine import CACHE, WEIGHTS, Engine
from alignment_core.inference.options import wakes
from alignment_core.recipes import ResourcesConfig


@pytest.mark.parametrize(("wanted", "share"), [({}, "0.4"), ({"gpu_memory_utilization": 0.6}, "0.6")])
def test_no_smaller_micro_batch_is_tried_where_an_engine_needs_the_memory(wanted: dict[str, Any], share: str) -> None:
    says = rf"gpu_memory_utilization: {share}\), .* lower the field, .*placement: disaggregated\); vLLM: CUDA out of"
    with pytest.raises(EnvironmentFault, match=says), wakes(ResourcesConfig(**wanted)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nadvice")


def test_other_errors_of_an_engine_that_wakes_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"), wakes(ResourcesConfig()):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("asleep", [{WEIGHTS, CACHE}, set()], ids=["asleep", "awake"])
def test_free_memory_is_that_beside_the_weights(asleep: set[str]) -> None:
    """Buckets must fit beside weights that a sleeping engine has yet to wake. vLLM itself only sleeps on GPUs."""
    calls: list[Any] = []

    def collective_rpc(method: str) -> list[int]:
        calls.append(method)
        return [5]

    engine = Engine.__new__(Engine)
    engine.llm = SimpleNamespace(wake_up=calls.append, collective_rpc=collective_rpc)
    engine.policy = "policy"
    engine._resources = ResourcesConfig()
    engine._asleep = {*asleep}
    engine._half_loaded = False
    assert engine.free_memory() == [5]
    if not asleep:
        assert (calls, engine.policy, engine._half_loaded) == (["free_memory"], "policy", False)
        return
    assert calls == [[WEIGHTS], "free_memory"]
    assert engine._asleep == {CACHE}
    with pytest.raises(RuntimeError, match="half-loaded"):
        engine.release(sleep=True)  # without the update it holds no policy, and must not be kept
