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
from alignment_core.init.machine import Machine, this_machine
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
    """A token keeps 5 · 576 + 2 · 192 + 2 · 1536 = 6,336 numbers in each of 30 layers; the logits of 256 take 16 · 49,152."""
    fitted = fit_on_cpu(Machine(0, 64 * GIB, cpu_multiplies_bf16=bf16, trainers=2), model(), 49)
    assert fitted is not None
    assert fitted.each == GIB + COUNT * size + 2048 * 30 * 6336 * size + 256 * 16 * 49152
    assert (fitted.state, fitted.lora, fitted.trainers) == (COUNT * state, False, 2)


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
        counted.append(fitted.each)
    assert (kept[1] - kept[0]) / 256 == pytest.approx((counted[1] - counted[0]) / 2048, rel=0.02)


@pytest.mark.parametrize(
    ("memory", "trainers", "lora", "fitting"),
    [
        (32, 4, False, 4),  # 4 · 3.13 + 1.5 = 14.0 GiB of 19.2
        (16, 4, False, 2),  # 3 · 3.13 + 1.5 = 10.9 of 9.6
        (8, 2, False, 1),  # 3.13 + 1.5 = 4.6 of 4.8
        (6, 2, True, 1),  # 3.13 of 3.6
        (4, 2, True, 1),  # nothing fits: the least
    ],
)
def test_processes_are_as_many_as_fit(memory: int, trainers: int, lora: bool, fitting: int) -> None:
    fitted = fit_on_cpu(Machine(0, memory * GIB, trainers=trainers), model(), 2048)
    assert fitted is not None
    assert (fitted.lora, fitted.trainers) == (lora, fitting)


def test_a_gpu_or_an_unknown_size_is_not_counted() -> None:
    assert fit_on_cpu(Machine(1, 80 * GIB), model(), 2048) is None
    assert fit_on_cpu(Machine(0, 80 * GIB), Model("unknown", ""), 2048) is None


def test_a_recipe_has_the_processes_that_fit(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "smol")
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | SMOL))
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    written = draft(file, Machine(0, 8 * GIB, trainers=2), model=str(folder), method="sft")
    assert written.recipe["resources"] == {"trainers": 1}
    assert "processes that fit into 8 GiB, counted with 3.1 each" in written.text
    assert "lora" not in written.recipe["sft"]["training"]
    assert "resources" not in draft(file, Machine(0, 16 * GIB, trainers=2), model=str(folder), method="sft").recipe
    small = draft(file, Machine(0, 6 * GIB, trainers=2), model=str(folder), method="sft")
    assert "training all weights needs 5 GiB; no GPU, 6 GiB of memory here" in small.text


def test_this_machine_has_the_trainers_of_a_run() -> None:
    machine = this_machine()
    assert machine.gpus or 1 <= machine.trainers <= 4
