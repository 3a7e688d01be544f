"""The memory of training on a CPU, counted for stand-in machines: processes, and adapters where all weights do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.checks.memory_needs import parameters
from alignment_core.init.machine import Machine
from alignment_core.init.memory import GIB, fit_on_cpu
from alignment_core.init.models import Model
from alignment_core.models.activations import recompute
from tests.checks.test_memory_needs import SMOL
from tests.init.conftest import Draft
from tests.init.rows_of_kinds import ROWS, jsonl
from tests.init.tensor_memory import TensorMemory

COUNT = 134_479_872
"""SmolLM2-135M without its norms."""


def model() -> Model:
    return Model("SmolLM2", "", parameters=parameters(SMOL), shape=SMOL)


@pytest.mark.parametrize(("bf16", "size", "state"), [(False, 4, 12), (True, 2, 16)])
def test_bytes_are_those_of_a_calculation_by_hand(bf16: bool, size: int, state: int) -> None:
    """A token keeps 5 · 576 + 2 · 192 + 2 · 1536 = 6,336 numbers in each of 30 layers; the logits of 256 take 16 · 49,152, and
    with bf16 the gradients of 2,048 take 2 · 49,152."""
    fitted = fit_on_cpu(Machine(0, 64 * GIB, cpu_multiplies_bf16=bf16), model(), 49)
    assert fitted is not None
    of_logits = (256 * 16 + (2048 * 2 if bf16 else 0)) * 49152
    assert fitted.needed == GIB + COUNT * (size + state) + 2048 * 30 * 6336 * size + of_logits
    assert not fitted.lora


def test_a_layer_keeps_as_many_numbers_as_are_counted() -> None:
    """Two layers more of 256 tokens, in what a model keeps for its backward pass."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
    counted, kept = [], []
    for layers in (2, 4):
        config = transformers.LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=32, tie_word_embeddings=True)
        network = transformers.LlamaForCausalLM(config).train()
        recompute(network, "selective")
        with TensorMemory(network.parameters()) as tensors:
            output = network.model(input_ids=torch.zeros(1, 256, dtype=torch.long), use_cache=False)
        kept.append(tensors.bytes)
        del output
        fitted = fit_on_cpu(Machine(0, GIB), Model("", "", parameters=1, shape=config.to_dict()), 256)
        assert fitted is not None
        counted.append(fitted.needed)
    assert (kept[1] - kept[0]) / 256 == pytest.approx((counted[1] - counted[0]) / 2048, rel=0.02)


@pytest.mark.parametrize(("memory", "lora"), [(8, False), (6, True)])
def test_adapters_are_trained_if_all_weights_do_not_fit(memory: int, lora: bool) -> None:
    """1 + 0.5 + 1.45 + 0.19 + 1.5 = 4.6 GiB, of 4.8 and 3.6."""
    fitted = fit_on_cpu(Machine(0, memory * GIB), model(), 2048)
    assert fitted is not None
    assert fitted.lora == lora


def test_a_gpu_or_an_unknown_size_is_not_counted() -> None:
    assert fit_on_cpu(Machine(1, 80 * GIB), model(), 2048) is None
    assert fit_on_cpu(Machine(0, 80 * GIB), Model("unknown", ""), 2048) is None


def test_a_recipe_has_the_adapters_that_fit(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "smol")
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | SMOL))
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    written = draft(file, Machine(0, 8 * GIB), model=str(folder), method="sft")
    assert "resources" not in written.recipe
    assert "lora" not in written.recipe["sft"]["training"]
    small = draft(file, Machine(0, 6 * GIB), model=str(folder), method="sft")
    assert small.recipe["sft"]["training"]["lora"]
    assert "training all weights needs 5 GiB; no GPU, 6 GiB of memory here" in small.text
