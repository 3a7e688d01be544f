"""Sequences that an engine on a GPU samples at a time, by hand."""

from __future__ import annotations

import pytest

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.estimate import Cluster, _engines
from alignment_core.capacity.hardware import hardware_of
from alignment_core.recipes import ResourcesConfig
from tests.capacity.shapes import QWEN_2_5_7B


@pytest.mark.parametrize(
    ("kind", "tokens", "given", "expected"),
    [
        ("h100", 512, None, 1024),
        ("h100", 512, 100, 100),
        ("a100", 512, None, 256),
        ("h100", 2048, None, 465),
        ("h100", 8192, None, 116),
    ],
)
def test_an_engine_samples_as_many_as_its_cache_and_its_gpu_allow(
    kind: str, tokens: int, given: int | None, expected: int
) -> None:
    """Of 80 GB an engine takes 90 %, 72 GB; 15.23 GB are weights (7.616 billion parameters in bf16), 2.15 GB a reserve, and
    54.62 GB its cache. A token takes 2 · 28 layers · 4 heads · 128 · 2 bytes, 57,344: 2,048 tokens 117.4 MB, a 465th part."""
    cluster = Cluster(hardware_of(kind), 8, Architecture.of(QWEN_2_5_7B))
    resources = ResourcesConfig(device="cuda", gpu_memory_utilization=0.9, max_num_seqs=given)
    _, _, at_once, problems = _engines(tokens // 2, tokens // 2, resources, cluster)
    assert (at_once, problems) == (expected, [])
