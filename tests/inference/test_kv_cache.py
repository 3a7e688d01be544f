"""How much key-value cache a sequence needs, and the sentence of an engine that has too little."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.inference import kv_cache
from alignment_core.inference.kv_cache import (
    bytes_per_token,
    max_num_seqs_on_cpu,
    max_num_seqs_on_gpu,
    mib_needed,
    mib_of_engine,
    raise_it,
    room_mib,
)
from alignment_core.inference.options import started
from alignment_core.machine_memory import Memory
from alignment_core.recipes import ResourcesConfig
from tests.inference.shapes import SMOLLM2


def test_plain_attention_takes_a_key_and_a_value_for_each_layer_and_head() -> None:
    """2 · 30 layers · 3 key-value heads · 64 dimensions · 4 bytes = 46,080 bytes a token."""
    assert bytes_per_token(SMOLLM2) == 46_080
    assert bytes_per_token({**SMOLLM2, "dtype": "bfloat16"}) == 23_040
    assert bytes_per_token(SMOLLM2, number_bytes=2) == 23_040
    assert bytes_per_token(SMOLLM2, shards=3) == 15_360, "each of three workers holds one of the three heads"


def test_a_sequence_takes_whole_blocks_and_a_spare_block() -> None:
    """vLLM's own estimate for this model with 256 MiB is 5,792 tokens (its message, version 0.32): 256 MiB are 182 blocks of
    32 · 46,080 = 1,474,560 bytes, of which one stays free; 181 · 32 = 5,792. All 8,192 tokens take 256 blocks and that one,
    257 · 1,474,560 bytes = 361.4 MiB."""
    assert (mib_needed(SMOLLM2, 5792), mib_needed(SMOLLM2, 5793)) == (256, 258)
    assert mib_needed(SMOLLM2, 8192) == 362


def test_a_sliding_window_takes_an_additional_block() -> None:
    """vLLM 0.32 reports that 32,704 tokens fit in 32 MiB: a block is 32 · 1,024 bytes, so there are 1,024 of them,
    one stays free, one is for a window that begins inside a block, and 1,022 · 32 = 32,704."""
    mistral = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 4,
    }
    windowed = {**mistral, "sliding_window": 64}
    assert (mib_needed(windowed, 32_704), mib_needed(windowed, 32_705)) == (32, 33)
    assert mib_needed(mistral, 32_736) == 32
    assert mib_needed({**windowed, "use_sliding_window": False}, 32_736) == 32
    assert mib_needed({**mistral, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 32_705) == 33


def test_by_default_the_cache_has_room_for_all_sequences_of_an_engine_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """46,080 bytes a token, 1.41 MiB a block of 32: for 96 tokens 4 · 3 blocks and a free one take 18.3 MiB, for 97 tokens
    4 · 4 and that one 23.9; in bf16 half, with one of the three heads a third. 256 · 3 blocks exceed the limit."""
    monkeypatch.setattr(kv_cache, "machine_memory", lambda: Memory(8 << 30, 0))
    shape = {**SMOLLM2, "dtype": "bfloat16"}
    few = ResourcesConfig(max_num_seqs=4)
    assert mib_of_engine(shape, 96, "float32", few) == 19
    assert mib_of_engine(shape, 97, "float32", few) == 24
    assert mib_of_engine(shape, 96, "bfloat16", few) == 10
    assert mib_of_engine(shape, 96, "float32", few.model_copy(update={"tensor_parallel_size": 2})) == 7
    assert mib_of_engine(shape, 96, "float32", ResourcesConfig()) == 1024
    assert mib_of_engine({}, 96, "float32", few) == 1024, "an unknown layout"
    assert mib_of_engine(shape, 96, "float32", ResourcesConfig(max_num_seqs=4, kv_cache_mib=300)) == 300


def test_by_default_the_caches_leave_most_of_a_small_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of 6 GiB is 768 MiB, for each of two engines 384; a sequence of 8,192 tokens takes 362 MiB (above), and one of
    twice as many 513 blocks of 1.41 MiB, 721.4 MiB. vLLM's engines do not start if less than their cache is free."""
    monkeypatch.setattr(kv_cache, "machine_memory", lambda: Memory(6 << 30, 0))
    resources = ResourcesConfig()
    assert mib_of_engine(SMOLLM2, 4096, "float32", resources) == room_mib(resources) == 768
    assert mib_of_engine(SMOLLM2, 8192, "float32", resources, engines=2) == 384
    assert mib_of_engine(SMOLLM2, 16384, "float32", resources, engines=2) == 722
    assert room_mib(resources, engines=4) == 256
    assert room_mib(ResourcesConfig(kv_cache_mib=900), engines=4) == 900


@pytest.mark.parametrize(("tokens", "expected"), [(2000, 1024), (300, 256), (100, 256), ("env:TOKENS", 1024)])
def test_by_default_a_step_has_room_for_a_token_of_each_sequence(tokens: Any, expected: int) -> None:
    """vLLM refuses `max_num_seqs` above `max_num_batched_tokens`."""
    resources = ResourcesConfig(engine_options={"max_num_batched_tokens": tokens})
    assert max_num_seqs_on_gpu(resources, 80 << 30, "H100") == expected


@pytest.mark.parametrize("number", [4, 2000])
def test_an_engine_samples_as_many_sequences_at_a_time_as_the_recipe_says(number: int) -> None:
    resources = ResourcesConfig(max_num_seqs=number)
    assert max_num_seqs_on_gpu(resources, 24 << 30, "L4") == max_num_seqs_on_cpu(resources) == number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 85_029_158_912),
        ("NVIDIA A100-SXM4-80GB", 85_094_825_984),
        ("NVIDIA L40S", 47_697_362_944),
        ("NVIDIA B200", 191_514_017_792),
    ],
)
def test_the_default_on_a_gpu_is_that_of_vllm(name: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    gpu = SimpleNamespace(
        get_device_total_memory=lambda: memory,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", gpu)
    _, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
    assert max_num_seqs_on_gpu(ResourcesConfig(), memory, name) == sequences[UsageContext.LLM_CLASS]


def test_an_engine_whose_cache_exceeds_the_free_memory_names_the_setting(tmp_path: Any) -> None:
    message = (  # vLLM 0.32's, of its worker for CPUs
        "Available memory on node 0 (0.71/3.90 GiB) on kv cache allocation is less than requested memory for kv (1.0 GiB). "
        "Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
    )

    def make(**_: Any) -> None:
        raise ValueError(message)

    with pytest.raises(EnvironmentFault, match=r"set a smaller resources\.kv_cache_mib, .* Available memory on node 0"):
        started(make, tmp_path, "float32", 8192, ResourcesConfig(), "cpu")


@pytest.mark.parametrize(
    ("shape", "each"),
    [
        # No separate key-value heads: as many as attention heads; 2 · 2 · 4 · 16 · 4.
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}, 1024),
        # GPT-2's names: 2 · 12 · 12 · 64 · 4.
        ({"n_embd": 768, "n_head": 12, "n_layer": 12}, 73_728),
        # Multi-query: one key-value head; 2 · 2 · 1 · 16 · 4.
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "multi_query": True}, 256),
        # Latent attention, as DeepSeek-V2 Lite: 27 · (512 + 64) · 2.
        (
            {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 27, "kv_lora_rank": 512}
            | {"qk_rope_head_dim": 64, "dtype": "bfloat16"},
            31_104,
        ),
        # Layers with a sliding window count in full: 2 · 4 · 4 · 16 · 4.
        (
            {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "sliding_window": 8}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            2048,
        ),
        # Of four layers one has attention, the others a recurrent state: 2 · 1 · 4 · 16 · 4.
        (
            {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
            | {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
            512,
        ),
        # Of a model with pictures the text part counts.
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}}, 1024),
        ({}, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "attn_layer_period": 8}, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "mamba_d_state": 8}, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "global_head_dim": 32}, None),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": [1, 2]}, None),
    ],
)
def test_bytes_per_token_of_other_architectures(shape: dict[str, Any], each: int | None) -> None:
    assert bytes_per_token(shape) == each


VLLM = (
    "To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is needed, which is larger than the "
    "available KV cache memory (0.25 GiB). Based on the available memory, the estimated maximum model length is 5792. Try …"
)
"""The error of version 0.32 for this model."""


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8192}])
def test_an_engine_whose_cache_is_too_small_names_the_setting(tmp_path: Any, options: dict[str, Any]) -> None:
    """362 MiB: see above. Further options of the engine are not blamed for it."""

    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))

    def make(**_: Any) -> None:
        raise ValueError(VLLM)

    with pytest.raises(UserError) as caught:
        started(make, tmp_path, "float32", 8192, ResourcesConfig(engine_options=options, kv_cache_mib=256), "cpu")
    first = str(caught.value)
    assert first.startswith("the engines' key-value cache cannot hold a sequence of 8,192 tokens")
    assert "raise resources.kv_cache_mib to 362 or more (it is 256;" in first
    assert "the estimated maximum model length is 5792" in first


NO_CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine (this flag "
    "also controls CPU memory reservation on the CPU backend, despite its name). See …"
)
NOT_FREE = (
    "Free memory on device cuda:0 (20.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.4, 31.64 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
"""Further errors of version 0.32 on a GPU."""
PART, GPUS = "resources.gpu_memory_utilization (it is 0.4)", "resources.tensor_parallel_size (it is 2)"


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8192}])
@pytest.mark.parametrize(
    ("error", "start", "advice"),
    [
        (ValueError(NO_CACHE), "the model leaves an engine no memory", f"raise {PART} or {GPUS}"),
        (
            ValueError(VLLM),
            "an engine's key-value cache cannot hold a sequence of 8,192",
            f"raise {PART} or {GPUS}, or lower",
        ),
        (
            ValueError(NOT_FREE),
            f"less memory of a GPU is free than {PART}",
            f"lower the field, if need be with a greater {GPUS}",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "the model does not fit", f"raise {GPUS}"),
    ],
)
def test_an_engine_that_does_not_fit_on_a_gpu_names_the_settings_that_apply_there(
    error: Exception, start: str, advice: str, options: dict[str, Any], tmp_path: Any
) -> None:
    def make(**_: Any) -> None:
        raise error

    resources = ResourcesConfig(engine_options=options, tensor_parallel_size=2)
    with pytest.raises(EnvironmentFault) as caught:
        started(make, tmp_path, "float32", 8192, resources, "cuda")
    sentence = str(caught.value)
    assert sentence.startswith(start)
    assert advice in sentence
    assert sentence.endswith(f"vLLM: {error}")
    assert "kv_cache_mib" not in sentence


def test_other_refusals_of_vllm_are_raised_unchanged(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")

    def make(**options: Any) -> None:
        raise ValueError("no such option")

    with pytest.raises(ValueError, match=r"^no such option$"):
        started(make, tmp_path, "float32", 64, ResourcesConfig(), "cuda")
    with pytest.raises(UserError, match=r"resources\.engine_options: vLLM does not accept swap_space: no such option"):
        started(make, tmp_path, "float32", 64, ResourcesConfig(engine_options={"swap_space": 4}), "cuda")


def test_the_advice_names_the_limit_of_the_default() -> None:
    first, _, _ = raise_it(1500, ResourcesConfig()).partition(";")
    assert first == "raise resources.kv_cache_mib to 1500 or more (it is 1024"


def test_no_size_below_the_present_size_is_advised() -> None:
    """On a GPU, or with a `kv_cache_dtype` of another size, the cache may be too small though `kv_cache_mib` is not."""
    assert raise_it(300, ResourcesConfig(kv_cache_mib=256)).startswith(
        "raise resources.kv_cache_mib to 300 or more (it is 256"
    )
    assert raise_it(13, ResourcesConfig(kv_cache_mib=256)).startswith("raise resources.kv_cache_mib (it is 256")
