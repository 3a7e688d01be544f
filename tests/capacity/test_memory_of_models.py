"""Bytes on a GPU, by hand and as DeepSpeed allocates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.capacity import memory
from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.estimate import estimate
from alignment_core.capacity.hardware import hardware_of
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import TrainingConfig
from alignment_core.training.engine import LARGEST_BUCKET
from tests.capacity import memory_ranks
from tests.capacity.shapes import QWEN_2_5_7B, only_work, ppo, recipe_of
from tests.matrix import cases
from tests.training import sharded_ranks

GB = 1e9


def test_ppo_of_7b_on_eight_gpus_is_too_large_when_the_engine_wakes(tmp_path: Path) -> None:
    """By hand, for 7.62B parameters and ZeRO 2 over 8: policy and critic have 2 bytes a parameter and 16 / 8, and buffers of
    500M gradients of 4 bytes; the reference has 2 bytes a parameter, and the engine 0.4 of 80 GB."""
    apart = {"models": {"reward": {"gpus": 1}}}
    recipe = recipe_of(tmp_path, ppo({**apart, "offload_while_sampling": False}))
    cluster = Cluster(hardware_of("h100"), 9, Architecture.of(QWEN_2_5_7B))
    result = estimate(only_work(recipe), recipe.resources, cluster)
    count = 7.62
    sampling = next(peak for peak in result.peaks if peak.moment == "sampling")
    assert sampling.parts["policy"] / GB == pytest.approx(count * (2 + 16 / 8) + 2, rel=0.01)
    assert sampling.parts["critic"] == sampling.parts["policy"]
    assert sampling.parts["reference"] / GB == pytest.approx(2 * count, rel=0.01)
    assert sampling.parts["engines"] / GB == pytest.approx(32)
    assert any("in sampling" in problem for problem in result.problems)

    rests = recipe_of(tmp_path, ppo({**apart, "gpu_memory_utilization": 0.8}))
    result = estimate(only_work(rests), rests.resources, cluster)
    of_moment = {peak.moment: peak for peak in result.peaks if peak.where == "policy"}
    assert of_moment["sampling"].size / GB == pytest.approx(64), "the trainers rest in CPU memory"
    assert of_moment["weight transfer"].parts["policy"] / GB == pytest.approx(2 * count, rel=0.01)
    assert of_moment["weight transfer"].parts["engines"] / GB == pytest.approx(2 * count + 2.1, rel=0.01)
    assert not any("in sampling" in problem for problem in result.problems)


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        (0, False, {"weights": 2.0, "gradients": 4.0, "optimiser": 12.0}),
        (1, False, {"weights": 2.0, "gradients": 4.0, "optimiser": 3.0}),
        (2, False, {"weights": 2.0, "gradients": 1.0, "optimiser": 3.0}),
        (3, False, {"weights": 0.5, "gradients": 1.0, "optimiser": 3.0}),
        (3, True, {"weights": 0.5, "gradients": 0.0, "optimiser": 0.0}),
    ],
)
def test_bytes_of_a_parameter_on_four_ranks(stage: int, offload: bool, expected: dict[str, float]) -> None:
    model = Architecture.of(QWEN_2_5_7B)
    role = memory.trained("policy", model, TrainingConfig(bf16=True), 4, stage, offload, True, 8192)
    for term, size in expected.items():
        assert role.terms[term] / model.parameters == pytest.approx(size), term
    assert role.host / model.parameters == pytest.approx(4.0 if offload else 0.0)


def test_updates_as_deltas_take_a_copy_of_the_weights_in_cpu_memory(tmp_path: Path) -> None:
    """7.62B parameters of 2 bytes; engines of two GPUs each have a copy for each GPU."""
    cluster = Cluster(hardware_of("h100"), 8, Architecture.of(QWEN_2_5_7B))
    apart = {"placement": "disaggregated", "tensor_parallel_size": 2, "trainers": 4, "engines": 2}
    by_mode = []
    for mode in ("full", "delta"):
        recipe = recipe_of(tmp_path, ppo({**apart, "weight_update_mode": mode}))
        result = estimate(only_work(recipe), recipe.resources, cluster)
        by_mode.append({role.name: role.host / GB for role in result.roles})
    full, delta = by_mode
    more = {name: delta[name] - full[name] for name in full if delta[name] != full[name]}
    assert more == {name: pytest.approx(2 * 7.62, rel=0.01) for name in ("policy", "engines")}


def test_the_counted_bucket_is_that_of_training() -> None:
    assert memory.BUCKET == LARGEST_BUCKET


def test_parameters_are_those_of_transformers() -> None:
    shape = {**QWEN_2_5_7B, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert Architecture.of(shape).parameters == pytest.approx(count, rel=1e-3)  # without biases and norms


def test_experts_that_a_token_is_not_sent_to_are_not_multiplied() -> None:
    """Mixtral 8x7B has 46.7B parameters, of which a token uses 12.9B (Jiang et al. 2024)."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    model = Architecture.of(shape)
    assert model.parameters / GB == pytest.approx(46.7, rel=0.01)
    assert model.active / GB == pytest.approx(12.9, rel=0.01)


@pytest.fixture(scope="module")
def model_of_14m(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("capacity") / "model"
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    shape |= {"vocab_size": 320, "tie_word_embeddings": False}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, pad_token_id=0)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder, shape


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), cases([(0, True), (1, False), (2, True), (3, True)], usual=[(3, True)]))
def test_resident_bytes_are_those_of_deepspeed(
    stage: int, bf16: bool, model_of_14m: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """All storages that two ranks hold after a step, within a quarter."""
    folder, shape = model_of_14m
    held = max(sharded_ranks.run(2, tmp_path, memory_ranks.resident, str(folder), stage, bf16))
    role = memory.trained(
        "policy",
        Architecture.of(shape),
        TrainingConfig(bf16=bf16),
        2,
        stage,
        offload=False,
        recompute=False,
        tokens=120,
    )
    assert 0.75 <= role.resident / held <= 1.25, (role.terms, held)
