"""Engines of models that also read images, which are sampled as those of text are, by token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import GenerationConfig
from tests.exports.conftest import edit
from tests.inference.test_engine_parity import POLICY

PROMPT = [72, 101, 108]
TEXT = {
    "vocab_size": 280, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip


@pytest.mark.slow
def test_a_model_that_also_reads_images_is_sampled(machines: Any, tmp_path: Path) -> None:
    """vLLM makes its processor of images with the tokenizer, without which the engine did not start. Greedy answers are those
    of ``transformers``."""
    tokenizer = byte_tokenizer()
    tokens = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # which Gemma's has
    tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token = tokens
    image, first, last = tokenizer.convert_tokens_to_ids(tokens)
    for name, number in (("image_token_id", image), ("boi_token_id", first), ("eoi_token_id", last)):
        setattr(tokenizer, name, number)
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_id=image, boi_token_index=first,
        eoi_token_index=last, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    of_hub = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in weights.items()}
    save_file(of_hub, tmp_path / "model.safetensors", metadata={"format": "pt"})
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(tmp_path)
    named = dict(zip(("image_token", "boi_token", "eoi_token"), tokens, strict=True))
    edit(tmp_path / "tokenizer_config.json", extra_special_tokens=named)
    ids = torch.tensor([PROMPT])
    right = model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    with machines(1).engines(EngineRequest(Model(tmp_path, POLICY["a"]), 64)) as group:
        greedy = GenerationConfig(temperature=0.0, num_generations=1, max_completion_length=6)
        stop = [tokenizer.eos_token_id]
        (answer,) = group.one(0, Engine.generate, str(POLICY["a"]), [PROMPT], greedy, stop, 0).each()
    assert answer.token_ids.tolist() == right[0, len(PROMPT) :].tolist()
