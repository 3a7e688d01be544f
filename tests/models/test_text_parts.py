"""Multimodal models of which ``transformers`` loads only the part for text as a language model."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from alignment_core.cluster.device import Device
from alignment_core.errors import UserError
from alignment_core.models.loading import is_text_part, load_model
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training import policy_trainer
from tests.exports.conftest import handle

TEXT = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def qwen() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 32}
    return transformers.Qwen3_5Config(text_config={**TEXT, "layer_types": ["full_attention"]}, vision_config=vision)


def gemma() -> Any:
    return transformers.Gemma3Config(text_config=TEXT, vision_config={**VISION, "image_size": 28})


def mllama() -> Any:
    text = {**TEXT, "cross_attention_layers": [], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    vision: dict[str, Any] = {
        **VISION,
        "attention_heads": 1,
        "num_global_layers": 1,
        "image_size": 28,
        "vision_output_dim": 32,
    }
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    return transformers.MllamaConfig(text_config=text, vision_config=vision)


@pytest.mark.parametrize(
    ("config", "is_part"), [(mllama(), True), (qwen(), False), (gemma(), False)], ids=["mllama", "qwen3_5", "gemma3"]
)
def test_a_model_that_leaves_its_images_behind_says_so_and_its_engine_is_not_updated(
    config: Any, is_part: bool, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    """``AutoModelForCausalLM`` has no weights of Mllama's images, and all of Gemma 3's. Qwen3.5 is loaded as a whole, too."""
    folder = tmp_path / "model"
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    with caplog.at_level(logging.WARNING, "alignment_core"):
        model = load_model(str(folder), "lm", torch.float32)
    assert ("only the part that reads text is loaded" in caplog.text) is is_part
    assert is_text_part(model, folder) is is_part
    assert any("vision" in name or "visual" in name for name in model.state_dict()) is not is_part

    section = RlConfig.model_validate({"prompts": "none.jsonl", "rewards": [{"verifier": "task"}]})
    job = policy_trainer.RlJob(section, handle(folder), critic=None, seed=0)
    learner = SimpleNamespace(packed=SimpleNamespace(model=model), zero_stage=0)
    monkeypatch.setattr(policy_trainer, "Learner", lambda *_: learner)  # the real one needs processes of DeepSpeed
    message = r"model@\w+:a+ also reads images or sounds, and `transformers` trains only the part"
    with pytest.raises(UserError, match=message) if is_part else nullcontext():
        job.open(ResourcesConfig(), Device.detect("cpu", 0), 0, 1)
