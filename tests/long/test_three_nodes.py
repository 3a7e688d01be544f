"""Engines on several nodes get the policy by a broadcast, and sample what engines of one machine do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.align import references, run_align
from tests.servers.ray_nodes import RayNodes
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RECIPE = """
method: rl
name: nodes
seed: 1
model:
  scratch: {architecture: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
rl:
  prompts: {task: reverse, rows: 24}
  steps: 3
  prompts_per_step: 6
  generation: {num_generations: 4, max_completion_length: 6, shard_size: 2}
  rewards: [{verifier: task}]
  importance_sampling_correction: {stop_above: 1.0e-5}
  training: {batch_size: 24, learning_rate: 1.0e-3}
resources: {trainers: 1, engines: 3, threads: 1, kv_cache_mib: 16}
"""


@pytest.fixture
def nodes(s3_server: S3Server) -> Iterator[RayNodes]:
    nodes = RayNodes(s3_server.environment())
    yield nodes
    nodes.end()


SMALL_STEPS = {
    "rl.training.learning_rate": 1e-5,
    "rl.training.bf16": True,
    "rl.importance_sampling_correction.stop_above": 0.1,
}
"""Each changes less than half of the weights, so that deltas are sent. Rounding of bf16 differs in vLLM."""
DELTAS = {"resources.weight_update_mode": "delta"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="broadcast"),
        pytest.param({"resources.weight_transfer": "ray"}, id="ray"),
        pytest.param({"rl.training.lora": "{r: 4}"}, id="merged adapters"),
        pytest.param({"rl.training.lora": "{r: 4}", "resources.max_lora_rank": 8}, id="adapters"),
        pytest.param({"resources.tensor_parallel_size": 2, "resources.engines": 2}, id="two workers each"),
        pytest.param(SMALL_STEPS | DELTAS, id="deltas by broadcast"),
        pytest.param(SMALL_STEPS | DELTAS | {"resources.weight_transfer": "ray"}, id="deltas by Ray"),
    ],
)
def test_engines_on_several_nodes_follow_the_policy(
    settings: dict[str, Any], nodes: RayNodes, bucket: str, tmp_path: Path
) -> None:
    """``stop_above`` would end the run if an engine sampled from another policy; after small steps, other samples would lead
    to other weights."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    command = ["run", str(recipe)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    homes = [tmp_path / name for name in ("alone", "one", "two", "three")]
    for home in homes:
        home.mkdir()
    alone = references(run_align(homes[0], *command, "--set", "resources.weight_update_mode=full", expect=0))
    nodes.start(homes[1])
    for home in homes[2:]:
        nodes.start(home, hidden=[homes[1]])
    command += ["--store", f"s3://{bucket}/{tmp_path.name}"]
    over_nodes = run_align(homes[1], *command, expect=0, timeout=550, **nodes.environment())
    assert references(over_nodes) == alone
    for home in homes[2 : 1 + int(settings.get("resources.engines", 3))]:
        assert any(home.glob("stores/*/cache/*")), "each node took part, with its own cache"


def test_memory_of_one_node_is_refused_for_engines_on_others(nodes: RayNodes, bucket: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
        nodes.start(home)
    command = ["run", str(recipe), "--set", "resources.weight_transfer=memory", "--set", "resources.engines=2"]
    command += ["--store", f"s3://{bucket}/{tmp_path.name}"]
    failure = run_align(homes[0], *command, expect=2, timeout=550, **nodes.environment())
    says = "rl: resources.weight_transfer: memory needs all engines on the node of the first trainer: use auto, or broadcast"
    assert failure["error"] == says
