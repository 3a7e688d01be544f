"""Tables 3 and 5 of OpenRLHF's paper (Hu et al. 2024, arXiv:2405.11143): layouts of PPO with Llama 2, and what a step took."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.estimate import Estimate, estimate
from alignment_core.capacity.hardware import hardware_of
from tests.capacity.shapes import llama, only_work, ppo, recipe_of


class Row(NamedTuple):
    """Table 3: GPUs of each model, and completions that an engine samples at a time. Table 5: seconds."""

    gpus: int
    actor: int
    critic: int
    reference: int
    reward: int
    engines: int
    tensor_parallel: int
    at_once: int
    generation: float
    weights: float
    logits_and_reward: float
    training: float


TABLES = {
    "7B": Row(16, 4, 4, 2, 2, 4, 1, 16, 262.96, 4.32, 32.7, 171.13),
    "13B": Row(32, 8, 8, 4, 4, 8, 1, 8, 372.14, 10.03, 29.58, 197.18),
    "34B": Row(32, 8, 8, 4, 4, 4, 2, 8, 720.50, 35.47, 326.00, 444.43),
    "70B": Row(32, 4, 4, 4, 4, 4, 4, 4, 2252.79, 111.65, 323.38, 1800.71),
}
WITHIN = 1.5
NOT_WITHIN = {
    ("7B", "logits_and_reward"),
    ("13B", "logits_and_reward"),
    ("70B", "weights"),
}
"""The paper's times of forward passes are below those of 312 TFLOP/s for whole sequences at 7B, and longer for 34B than for
70B; its time of weights grows faster than the weights. docs/capacity.md says so."""


@pytest.fixture(params=TABLES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Row, Estimate]:
    row = TABLES[request.param]
    resources = {
        "placement": "disaggregated",
        "trainers": row.actor,
        "engines": row.engines,
        "tensor_parallel_size": row.tensor_parallel,
        "max_num_seqs": row.at_once,
        "gpu_memory_utilization": 0.9,
        "zero_stage": 3,
        "offload_optimizer": True,
        "gradient_checkpointing": True,
        "models": {
            "critic": {"gpus": row.critic},
            "reference": {"gpus": row.reference, "zero_stage": 3},
            "reward": {"gpus": row.reward, "zero_stage": 3},
        },
    }
    recipe = recipe_of(tmp_path, ppo(resources))
    cluster = Cluster(hardware_of("a800"), row.gpus, llama(request.param))
    return request.param, row, estimate(only_work(recipe), recipe.resources, cluster)


def test_the_layouts_of_table_3_fit(case: tuple[str, Row, Estimate]) -> None:
    _, _, result = case
    assert result.problems == ()
    assert {peak.where for peak in result.peaks} == {"policy", "critic", "reference", "reward", "engines"}


def test_the_times_of_table_5(case: tuple[str, Row, Estimate]) -> None:
    size, row, result = case
    parts = result.seconds
    ours = {
        "generation": parts["sample"],
        "weights": parts["transfer"],
        # There, reward models and references compute at the same time.
        "logits_and_reward": max(parts["reward"], parts["logps"]),
        "training": parts["train"] + parts["optimiser"],
    }
    for name, seconds in ours.items():
        ratio = seconds / getattr(row, name)
        assert (1 / WITHIN <= ratio <= WITHIN) == ((size, name) not in NOT_WITHIN), (name, ratio)
    total = sum(ours.values()) / (row.generation + row.weights + row.logits_and_reward + row.training)
    assert 1 / WITHIN <= total <= WITHIN
