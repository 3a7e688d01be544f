"""The memory that a plan needs at the least, against that of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.checks import memory_needs
from alignment_core.checks.memory_needs import GIB, bytes_needed, parameters, shortage
from alignment_core.composition.plan import PlannedStage
from alignment_core.errors import EnvironmentFault
from alignment_core.inference import kv_cache
from alignment_core.machine_memory import Memory
from alignment_core.recipes import GenerationConfig, ResourcesConfig, RlConfig, TrainingConfig
from alignment_core.recipes.sections.model import ScratchModel
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.rl import RlStageConfig
from alignment_core.stages.sft import SftStageConfig
from tests.checks.recipes import look, sft

SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def test_parameters_are_those_of_the_shape() -> None:
    """SmolLM2-135M has 134,515,008 parameters, as `transformers` counts them; 61 norms of 576 are left out here."""
    assert parameters(SMOL) == 134_515_008 - 61 * 576
    assert parameters({}) == 0


def test_the_layers_of_a_new_model_count_before_its_vocabulary_is_known() -> None:
    """Llama 3's 8B with 32 key-value heads: 32 × (4096·128·2·64 + 3·4096·14336) = 32 × (67,108,864 + 176,160,768)."""
    scratch = ScratchModel(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    assert parameters(scratch.model_dump()) == 7_784_628_224


def test_training_needs_weights_on_each_trainer_and_gradients_and_moments_once() -> None:
    """1e9 parameters on 2 trainers: 2 × (4e9 + 0.3 GiB) + 12e9 bytes, and 0.4 GiB for the host. With LoRA the 12e9 are not
    needed, in bf16 2 × 2e9 of the weights are enough. Trainers that share layers have 4e9 bytes of weights together."""
    resources = ResourcesConfig(device="cpu", trainers=2)
    processes = 2 * int(0.3 * GIB) + int(0.4 * GIB)

    def needed(**training: Any) -> int:
        stage = PlannedStage("sft", "sft", SftStageConfig(training=TrainingConfig(**training)), {}, "runs")
        return bytes_needed([stage], 10**9, resources)

    assert needed() == 20 * 10**9 + processes
    assert needed(lora={"r": 8}) == 8 * 10**9 + processes
    assert needed(bf16=True) == 16 * 10**9 + processes
    in_parts = resources.model_copy(update={"trainer_tensor_parallel_size": 2})
    stage = PlannedStage("sft", "sft", SftStageConfig(training=TrainingConfig()), {}, "runs")
    assert bytes_needed([stage], 10**9, in_parts) == 16 * 10**9 + processes
    assert needed(optimizer="adamw_8bit") == 14 * 10**9 + processes  # 2 bytes of moments instead of 8


def test_sampling_needs_the_cache_that_an_engine_will_have_at_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e9 parameters in bf16 on 2 engines: 2 × (2e9 + 0.5 GiB), and 0.4 GiB for the host. SmolLM2-135M's cache takes
    2·30·3·64·2 = 23,040 bytes a token. 16 completions of 100 tokens are in 4 blocks of 32 each, and one block stays free:
    65 · 32 · 23,040 bytes = 45.7 MiB. For 256 of 1,000 tokens, 5.6 GiB, an engine takes 1 GiB."""
    monkeypatch.setattr(kv_cache, "machine_memory", lambda: Memory(16 * GIB, 0))
    processes = 2 * (2 * 10**9 + int(0.5 * GIB)) + int(0.4 * GIB)

    def needed(tokens: int, shape: dict[str, Any], **resources: Any) -> int:
        generation = GenerationConfig(max_completion_length=tokens)
        stage = PlannedStage("sample", "generate", GenerateConfig(generation=generation), {}, "runs")
        return bytes_needed([stage], 10**9, ResourcesConfig(device="cpu", engines=2, **resources), shape)

    assert needed(100, SMOL, max_num_seqs=16) == processes + 2 * (46 << 20)
    assert needed(1000, SMOL) == processes + 2 * GIB
    assert needed(1000, SMOL, kv_cache_mib=300) == needed(1000, {}, kv_cache_mib=300) == processes + 2 * (300 << 20)
    assert needed(1000, {}) == processes


def test_a_policy_that_is_trained_in_fp32_is_sampled_in_fp32() -> None:
    """1e9 parameters: 4e9 bytes in the trainer, 4e9 in the engine and 12e9 of gradients and moments. In bf16 2e9 and 2e9."""
    resources = ResourcesConfig(device="cpu", trainers=1, engines=1)
    processes = int(0.3 * GIB) + int(0.5 * GIB) + int(0.4 * GIB)

    def needed(bf16: bool, resources: ResourcesConfig = resources) -> int:
        section = {"prompts": {"task": "first"}, "rewards": [{"verifier": "task"}], "training": {"bf16": bf16}}
        stage = PlannedStage("rl", "rl", RlStageConfig(section=RlConfig.model_validate(section)), {}, "runs")
        return bytes_needed([stage], 10**9, resources)

    assert needed(bf16=False) == 20 * 10**9 + processes
    assert needed(bf16=True) == 16 * 10**9 + processes
    full = ResourcesConfig(device="cpu", trainers=1, engines=2, tensor_parallel_size=2)
    deltas = full.model_copy(update={"weight_update_mode": "delta"})
    assert needed(True, deltas) - needed(True, full) == 10 * 10**9, "2 bytes in the trainer and in each of four workers"


def test_stages_on_gpus_or_a_cluster_are_not_compared_with_this_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = PlannedStage("sft", "sft", SftStageConfig(training=TrainingConfig()), {}, "runs")
    assert bytes_needed([stage], 10**9, ResourcesConfig(device="cuda")) == 0
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert bytes_needed([stage], 10**9, ResourcesConfig(device="cpu")) == 0


def test_a_machine_too_small_for_the_model_is_refused_and_a_busy_machine_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's monitor leaves 95 % of 10 GiB to processes: 9.5 GiB. With 8 GiB in use 1.5 GiB of them are free."""
    monkeypatch.setattr(memory_needs, "machine_memory", lambda: Memory(10 * GIB, 8 * GIB))
    with pytest.raises(
        EnvironmentFault, match=r"at least 12\.0 GiB of memory, and 9\.5 GiB of this machine's 10\.0 GiB"
    ):
        shortage(12 * GIB)
    sentence = shortage(3 * GIB)
    assert sentence is not None
    assert sentence.startswith(
        "this run needs at least 3.0 GiB of memory, and 1.5 GiB are free: other processes use 8.0"
    )
    assert shortage(GIB) is None


def test_a_recipe_whose_model_exceeds_the_memory_is_refused_before_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    recipe = {**sft(file), "resources": {"device": "cpu", "trainers": 2}}
    monkeypatch.setattr(memory_needs, "machine_memory", lambda: Memory(GIB, 0))
    with pytest.raises(EnvironmentFault, match=r"at least 1\.0 GiB of memory, and 0\.9 GiB of .* may be used"):
        look(store, recipe)
    monkeypatch.setattr(memory_needs, "machine_memory", lambda: Memory(8 * GIB, 7 * GIB))
    (warning,) = look(store, recipe).warnings
    assert "0.6 GiB are free: other processes use 7.0 GiB of 8.0 GiB" in warning
