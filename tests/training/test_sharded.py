"""ZeRO stage 3 from the start: no rank or device ever has a whole model, and the result is that of DeepSpeed's own way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from alignment_core.models.tokenizer import byte_tokenizer
from tests.matrix import matrix
from tests.training import sharded_ranks

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of 231M parameters, stored in this type."""
    models: dict[str, Path] = {}

    def make(dtype: str) -> Path:
        if dtype not in models:
            models[dtype] = folder = tmp_path_factory.mktemp("large") / dtype
            config = transformers.LlamaConfig(
                vocab_size=320,
                hidden_size=1024,
                intermediate_size=2720,
                num_hidden_layers=20,
                num_attention_heads=16,
                num_key_value_heads=8,
                pad_token_id=0,
            )
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(config)
            model.to_empty(device="cpu").to(getattr(torch, dtype))
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, 0.01)
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        return models[dtype]

    return make


TWO, FOUR, IN_BF16 = (2, "float32", False), (4, "bfloat16", False), (4, "bfloat16", True)
PEAKS = [sharded_ranks.peak_of_learner, sharded_ranks.peak_of_frozen]


@pytest.mark.parametrize(
    ("peak", "case"),
    matrix(PEAKS, [TWO, FOUR, IN_BF16], usual=[(PEAKS[0], TWO)]),
)
def test_no_rank_holds_more_than_its_part(
    peak: Callable[..., int], case: tuple[int, str, bool], large_model: Callable[[str], Path], tmp_path: Path
) -> None:
    world, stored, bf16 = case
    path = large_model(stored)
    sizes = []
    with safe_open(path / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dictionary)
            sizes.append(torch.Size(file.get_slice(name).get_shape()).numel() * (2 if bf16 else 4))
    part, largest = sum(sizes) / world, max(sizes)
    most = sharded_ranks.run(world, tmp_path, peak, str(path), bf16)
    around = 20 * MIB
    """Configuration, modules and their hooks, which have no weights."""
    assert max(most) <= 1.1 * part + largest + around, [bytes_ // MIB for bytes_ in most]
    assert max(most) < 0.7 * sum(sizes)


@pytest.mark.parametrize(
    ("stored", "training", "head"),
    [
        pytest.param("float32", {}, "value", marks=pytest.mark.exhaustive),
        pytest.param("float32", {"bf16": True}, "lm", marks=pytest.mark.exhaustive),
        ("float32", {"bf16": True, "lora": {"r": 4}}, "lm"),
        ("bfloat16", {}, "score"),
        pytest.param("bfloat16", {"lora": {"r": 4}}, "lm", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_those_of_deepspeed_with_a_whole_model_on_each_rank(
    stored: str, training: dict[str, Any], head: str, tiny_model: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tied=head != "lm"))
    model.to(getattr(torch, stored)).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["dtype"] == stored
    for ours, whole, buffers in sharded_ranks.run(2, tmp_path, sharded_ranks.losses, str(path), training, head):
        assert ours == whole
        assert ours[0] != ours[2], "it trains"
        assert buffers == ["torch.float32"], "rotary frequencies"


@pytest.mark.parametrize("bf16", matrix([False, True], usual=[False]))
def test_a_frozen_model_is_never_moved_as_a_whole(bf16: bool, tiny_model: Any, tmp_path: Path) -> None:
    """Its log-probabilities are those of plain ``transformers``, in bf16 up to rounding: 2⁻⁸ = 0.4 % of a number."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    ids = torch.randint(0, 250, (6, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logps = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    pairs = [(row[:9], row[9:]) for row in ids.tolist()]
    for ours in sharded_ranks.run(2, tmp_path, sharded_ranks.values, str(tiny_model()), bf16, pairs):
        assert ours == pytest.approx(logps[:, 8:].sum(1).tolist(), rel=4e-3 if bf16 else 1e-5)
