"""Rotary positions that depend on the length of a sequence: the engine and the trainer have the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Row, TokenSequence, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import GenerationConfig
from tests.inference.test_engine_parity import POLICY, STOP, parity
from tests.stages.rl_runs import RESOURCES, run_rl, section_of

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": STOP,
    "initializer_range": 0.3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + number / 20 for number in range(16)],
    "long_factor": [1 + number / 2 for number in range(16)],
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, Any] = {
    "longrope": transformers.Phi3Config(
        **SHAPE, max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=LONGROPE
    ),
    "dynamic": transformers.LlamaConfig(**SHAPE, max_position_embeddings=128, rope_parameters=DYNAMIC),
}


def create(name: str, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    config = MODELS[name].__class__.from_dict({**MODELS[name].to_dict(), "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [("longrope", 128), ("longrope", 64), ("dynamic", 128)])
def test_trainer_and_engine_agree_on_rotary_positions(name: str, context: int, machines: Any, tmp_path: Path) -> None:
    """Beyond and below the length that the model was first trained for (64 tokens of the first model, 128 of the second). The
    engine for long sequences is running when that for short ones is requested."""
    create(name, tmp_path / "model")
    prompts = [list(range(1, 40)), [5, 6, 7], list(range(60, 80))]
    generation = GenerationConfig(num_generations=1, max_completion_length=context - 39)
    with machines(1).engines(EngineRequest(Model(tmp_path / "model", POLICY["a"]), context)) as engine:
        completions = engine.one(0, Engine.generate, str(POLICY["a"]), prompts, generation, [STOP], 1)
        assert parity(engine, {"a": tmp_path / "model"}, "a") < 1e-4
    sampled = completions.each()
    rows = [
        Row(number, (TokenSequence.of_prompt_and_completion(prompt, completion.token_ids),))
        for number, (prompt, completion) in enumerate(zip(prompts, sampled, strict=True))
    ]
    packed = PackedModel(load_model(str(tmp_path / "model"), "lm", torch.float32), "lm", context=context)
    assert packed.shares_prefixes
    with torch.no_grad():
        logps = run_packed(packed, pack(rows))
    np.testing.assert_allclose(logps.numpy(), np.concatenate([completion.logps for completion in sampled]), atol=1e-4)


@pytest.mark.slow
def test_policy_and_reference_of_reinforcement_learning_have_the_engine_s_positions(
    machines: Any, tmp_path: Path
) -> None:
    """Completions of up to 80 tokens, beyond the 64 that the model was first trained for. The mismatch is the KL between the
    policy that sampled and the same policy in the trainer, and the KL to the start is 0 in the first step."""
    create("longrope", tmp_path / "model")
    reward = {"function": f"{tmp_path}/reward.py:length"}
    (tmp_path / "reward.py").write_text(
        "def length(rows):\n    return [len(row['completion']) / 100 for row in rows]\n"
    )
    section = section_of(1, reward, {"max_completion_length": 80}, kl={"coefficient": 0.1})
    _, result = run_rl(tmp_path / "run", tmp_path / "model", section, machines, RESOURCES)
    assert result.metrics["mismatch"] < 1e-6
    assert result.metrics["kl"] == pytest.approx(0, abs=1e-5)
