"""Sequences that an engine on a GPU samples at a time, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.estimate import Cluster, _engines
from alignment_core.capacity.hardware import hardware_of
from alignment_core.capacity.workload import Reinforcement
from alignment_core.recipes import ResourcesConfig
from tests.capacity.shapes import QWEN_2_5_7B, only_work, recipe_of


@pytest.mark.parametrize(
    ("kind", "tokens", "batch", "given", "expected"),
    [
        ("h100", 512, 64, None, 256),
        ("h100", 512, 512, None, 512),
        ("h100", 512, 4096, None, 1024),
        ("h100", 512, 4096, 100, 100),
        ("a100", 512, 4096, None, 256),
        ("h100", 2048, 4096, None, 465),
        ("h100", 8192, 4096, None, 116),
    ],
)
def test_an_engine_samples_as_many_as_its_batch_its_cache_and_its_gpu_allow(
    kind: str, tokens: int, batch: int, given: int | None, expected: int
) -> None:
    """Of 80 GB an engine takes 90 %, 72 GB; 15.23 GB are weights (7.616 billion parameters in bf16), 2.15 GB a reserve, and
    54.62 GB its cache. A token takes 2 · 28 layers · 4 heads · 128 · 2 bytes, 57,344: 2,048 tokens 117.4 MB, a 465th part."""
    cluster = Cluster(hardware_of(kind), 8, Architecture.of(QWEN_2_5_7B))
    resources = ResourcesConfig(device="cuda", gpu_memory_utilization=0.9, max_num_seqs=given)
    _, _, at_once, problems = _engines(tokens // 2, tokens // 2, batch, resources, cluster)
    assert (at_once, problems) == (expected, [])


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"prompts_per_step": 1024}, 512),
        ({"prompts_per_step": 16}, 128),
        ({"prompts_per_step": 1024, "execution": {"max_staleness": 1}}, 16_384),
    ],
)
def test_a_step_gives_an_engine_a_shard_at_a_time_or_all_that_it_samples_ahead(
    section: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    """A shard has 64 prompts of 8 completions each; one step ahead, two steps have 2 · 1,024 · 8."""
    content = {
        "prompts": {"path": "some/prompts"},
        "steps": 2,
        "rewards": [{"verifier": "math"}],
        "training": {"batch_size": 8},
        **section,
    }
    work = only_work(recipe_of(tmp_path, {"method": "rl", "rl": content}))
    assert isinstance(work, Reinforcement)
    assert work.section.sampled_at_once == expected
