"""The memory of a GPU, counted for stand-in machines: what a first recipe trains, and with which settings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alignment_core.checks.memory_needs import parameters
from alignment_core.init import memory, sections
from alignment_core.init.base import loaded
from alignment_core.init.lengths import Lengths
from alignment_core.init.machine import Machine
from alignment_core.init.memory import fit
from alignment_core.init.models import Model
from alignment_core.init.text import plain
from alignment_core.losses.logprobs import token_logps
from alignment_core.models import vocabulary_head
from tests.init.conftest import CPU, GIB, Draft
from tests.init.rows_of_kinds import ROWS, jsonl
from tests.init.tensor_memory import TensorMemory

QWEN = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
SHAPES = {
    "0.5B": QWEN | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "3B": QWEN | {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
"""Qwen2.5 and Llama 3.1, from their config.json."""


def gpus(count: int, each: int) -> Machine:
    return Machine(count, count * each * GIB)


def model(name: str) -> Model:
    return Model(name, "", parameters=parameters(SHAPES[name]), shape=SHAPES[name])


def test_bytes_are_those_of_a_calculation_by_hand() -> None:
    """0.494e9 parameters (model card) with 18 bytes: 8.28 GiB. A token takes 34 · 896 · 24 bytes in layers; the logits of 256
    take 16 · 151,936 each: 2 in bf16, 4 in fp32, 4 of their log-softmax, 4 and 2 of gradients; and 2 · 151,936 the gradients
    of each of 2,048, which are summed together."""
    half = fit(gpus(1, 80), model("0.5B"), 1024, shares=False)
    assert half is not None
    assert half.state / GIB == pytest.approx(8.28, rel=0.01)
    assert (memory.PLACES, memory.SUMMED) == (vocabulary_head.PLACES, vocabulary_head.SUMMED)
    of_logits = 256 * 2430976 + 2048 * 303872
    assert (half.budget, half.activations) == (16384, 16384 * 731136 + of_logits)
    # 3.09e9 parameters with 18 bytes: 51.7 GiB. A token with checkpointing: 2048 · (2 · 36 + 34).
    three = fit(gpus(1, 80), model("3B"), 1024, shares=False)
    assert three is not None
    assert three.state / GIB == pytest.approx(51.7, rel=0.01)
    assert (three.budget, three.activations) == (16384, 16384 * 217088 + of_logits)
    split = fit(gpus(8, 80), model("3B"), 1024, shares=False)
    assert split is not None
    assert split.state / GIB == pytest.approx(3.09e9 * (2 + 16 / 8) / GIB, rel=0.01)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("of_sum", [True, False])
def test_the_counted_logits_are_those_that_training_holds(of_sum: bool, trained: bool) -> None:
    """Of 4,096 tokens in bf16; the gradients of 4,096 × 8 weights and of hidden states are small beside those of logits."""
    states, weight = (torch.randn(4096, 8, dtype=torch.bfloat16, requires_grad=wanted) for wanted in (True, trained))
    labels = torch.zeros(4096, dtype=torch.long)

    def reduced(outputs_kV: torch.Tensor, places: slice) -> torch.Tensor:
        return token_logps(outputs_kV.float(), labels[places])

    with TensorMemory() as memory_of_tensors:
        vocabulary_head._OfLinear.apply(states, weight, None, reduced, of_sum).sum().backward()
    assert memory_of_tensors.most == pytest.approx(memory._of_logits(4096, summed=trained), rel=0.02)


@pytest.mark.parametrize(
    ("name", "machine", "shares", "trained", "checkpointing", "engine"),
    [
        ("0.5B", gpus(1, 24), True, "all weights", False, 0.7),
        ("3B", gpus(1, 80), True, "all weights", True, 0.7),  # 51.7 GiB, and 23 of activations
        ("3B", gpus(1, 24), False, "adapters", True, 0.7),
        ("8B", gpus(1, 24), False, "adapters", True, 0.75),  # 15 of 24 GiB, and a tenth
        (
            "8B",
            gpus(1, 32),
            True,
            "adapters beside 4 bits",
            True,
            0.7,
        ),  # of 28.8 GiB, 15 + 15 + 1 are more, 15 + 6 + 1 not
        ("8B", gpus(8, 80), True, "all weights", True, 0.7),
        ("8B", gpus(1, 16), False, "adapters beside 4 bits", True, None),  # 15 GiB of weights for an engine
    ],
)
def test_engine_and_trainer_take_turns_with_the_memory(
    name: str, machine: Machine, shares: bool, trained: str, checkpointing: bool, engine: float | None
) -> None:
    fitted = fit(machine, model(name), 1024, shares)
    assert fitted is not None
    assert fitted.fits
    assert (fitted.trained, fitted.checkpointing, fitted.engine) == (trained, checkpointing, engine)


def test_a_model_that_does_not_fit_says_so() -> None:
    """An engine's 15 GiB, a trainer's 6 and the buckets between them are more than 0.9 · 24."""
    fitted = fit(gpus(1, 24), model("8B"), 1024, shares=True)
    assert fitted is not None
    assert not fitted.fits
    assert fit(CPU, model("8B"), 1024, shares=True) is None
    assert fit(gpus(1, 24), Model("unknown", ""), 1024, shares=True) is None


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("nested", [False, True])
def test_fused_experts_are_not_counted_in_4_bits(name: str, nested: bool) -> None:
    """The same number of parameters fits into 16 GiB in 4 bits without experts, which transformers 5 keeps in parameters."""
    dense = model("8B")
    shape = {**dense.shape, name: 8}
    mixture = replace(dense, shape={"text_config": shape} if nested else shape)
    fitted = fit(gpus(1, 16), mixture, 1024, shares=False)
    assert fitted is not None
    assert (fitted.trained, fitted.fits) == ("adapters", False)
    without = fit(gpus(1, 16), replace(dense, shape={**dense.shape, name: 0}), 1024, shares=False)
    assert without is not None
    assert (without.trained, without.fits) == ("adapters beside 4 bits", True)


@pytest.mark.parametrize(
    ("kind", "method", "trained", "tokens"),
    [("messages", "sft", "adapters", 2048), ("preferences", "dpo", "adapters beside 4 bits", 16384)],
)
def test_a_pair_is_a_row_of_two_sequences(
    kind: str, method: str, trained: str, tokens: int, draft: Draft, tmp_path: Path
) -> None:
    """A token of 8B with checkpointing takes 4096 · (2 · 32 + 34) bytes, logits 256 · 16 · 128,256: 1.3 GiB for 2,048 tokens,
    beside 16.3 in bf16. A pair of 2,048 each takes 2.0, more than 20 · 0.9 - 16.3."""
    profile = draft(jsonl(tmp_path / "rows.jsonl", ROWS[kind][2]), method=method).profile
    profile = replace(profile, machine=gpus(1, 20), model=model("8B"), lengths=Lengths([2048], [100], [1948]))
    fitted = sections.fit(profile, sections.given_tokens(profile))
    assert fitted is not None
    assert fitted.trained == trained
    assert fitted.activations == tokens * 401_408 + 525_336_576


@pytest.mark.parametrize(
    ("kind", "method", "longest", "in_4bit", "tokens"),
    [
        ("prompt and label", "rejection-sampling", 2000, False, 3024),
        ("prompt and label", "conditional-sft", 2000, False, 3024),
        ("prompt and label", "iterative-dpo", 2000, True, 16384),  # two answers with their prompt: 6,048
        ("preferences", "rejection-sampling", 2100, True, 16384),  # the reward model's pairs: 4,200
        ("preferences", "iterative-dpo", 2100, True, 16384),
    ],
)
def test_training_on_sampled_answers_needs_the_memory_of_their_rows(
    kind: str, method: str, longest: int, in_4bit: bool, tokens: int, draft: Draft, tmp_path: Path
) -> None:
    """Prompts of 2,000 tokens and answers of 1,024. A token of 8B takes 401,408 bytes and logits 0.49 GiB, as above: 20 GiB
    have room for 3,230 beside 16.3 GiB of weights in bf16, and for 27,000, so a budget of 16,384, beside 7.3 in 4 bits."""
    profile = draft(jsonl(tmp_path / "rows.jsonl", ROWS[kind][2]), method=method).profile
    lengths = Lengths([longest], [2000], [1000])
    profile = replace(profile, machine=gpus(1, 20), model=replace(model("8B"), context=32768), lengths=lengths)
    written = loaded()[method].sections(profile)
    trained = [section["training"]["lora"].value for section in written.values() if "training" in section]
    assert [adapters.get("load_in_4bit", False) for adapters in trained] == [in_4bit] * len(trained)
    counted = sections.memory_fields(profile, written)["gradient_checkpointing"].comment
    assert f"{(tokens * 401_408 + 525_336_576) / GIB:.1f} of activations" in counted
    rounds = [plain(section["rounds"]) for section in written.values() if "rounds" in section]
    assert rounds == [1 if in_4bit else 2 for _ in rounds], "a second one would round off what the first learned"
    assert len(rounds) == (method != "conditional-sft")


def test_long_rows_recompute_activations_of_small_models() -> None:
    """131,072 tokens of 0.5B: 731 kB each are 89 GiB; recomputed, 896 · (2 · 24 + 34) bytes each are 9, beside 8 of weights."""
    long = fit(gpus(1, 80), model("0.5B"), 131072, shares=False)
    assert long is not None
    assert (long.checkpointing, long.fits) == (True, True)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Any:
    """A folder with the tokenizer of the tiny model and the shape of another."""

    def of(name: str, template: str | None = None) -> str:
        path = shutil.copytree(tiny_model(), tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        del config["head_dim"]
        (path / "config.json").write_text(json.dumps(config | SHAPES[name] | {"max_position_embeddings": 32768}))
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
        return str(path)

    return of


def test_a_recipe_for_a_gpu_has_the_counted_memory(draft: Draft, tmp_path: Path, folder: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    written = draft(file, gpus(1, 80), model=folder("3B"), method="sft")
    resources = written.recipe["resources"]
    assert resources == {
        "gradient_checkpointing": True,
        "max_tokens_per_microbatch": 16384,
        "gpu_memory_utilization": 0.7,
    }
    assert "counted on each GPU: 51.7 GiB of weights and optimiser" in written.text
    assert yaml.safe_load(written.text) == written.recipe
    assert "resources" not in draft(file, CPU, model=folder("0.5B"), method="sft").recipe


def test_a_recipe_that_does_not_fit_warns(draft: Draft, tmp_path: Path, folder: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["worked solutions"][2])
    written = draft(file, gpus(1, 24), model=folder("8B"), method="rl")
    assert any("does not fit, as it is counted for 1 GPU with 24 GiB" in sentence for sentence in written.warnings)
    assert written.recipe["rl"]["training"]["lora"]["load_in_4bit"] is True
    fits = draft(file, gpus(1, 80), model=written.recipe["model"], method="rl")
    assert not any("does not fit" in sentence for sentence in fits.warnings)
    assert fits.recipe["resources"]["gpu_memory_utilization"] == 0.7
    assert fits.recipe["rl"]["importance_sampling_correction"] == {"mode": "mask", "level": "sequence", "high": 3.0}


def test_a_model_that_thinks_gets_room_for_it(draft: Draft, tmp_path: Path, folder: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["worked solutions"][2])
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    thinks = draft(file, gpus(1, 80), model=folder("0.5B", template), method="rl")
    assert thinks.recipe["rl"]["generation"]["max_completion_length"] == 4096
    assert thinks.recipe["rl"]["prompts"]["max_length"] >= 32
    plain = draft(file, gpus(1, 80), model=folder("3B"), method="rl")
    assert plain.recipe["rl"]["generation"]["max_completion_length"] == 512


def test_a_reward_model_is_trained_for_one_epoch(draft: Draft, tmp_path: Path, folder: Any) -> None:
    """Ouyang et al. 2022: reward models overfit after one epoch."""
    file = jsonl(tmp_path / "rows.jsonl", ROWS["preferences"][2])
    written = draft(file, CPU, model=folder("0.5B"), method="reward-model").recipe
    assert written["reward_model"]["training"]["num_train_epochs"] == 1
    rounds = draft(file, gpus(1, 80), model=folder("3B"), method="iterative-dpo").recipe
    assert rounds["reward_model"]["training"]["num_train_epochs"] == 1
    assert rounds["iterative_dpo"]["training"]["num_train_epochs"] > 1
