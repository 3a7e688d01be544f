"""The log-probabilities of a vLLM engine with a pretrained model, by plain ``transformers``, before and after new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.execution.machines import WarmMachines
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import GenerationConfig

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "def add(a, b):",
    "Count from one to ten in French.",
)
END, TEXT_END = 2, 0
POLICY = {name: Reference.parse(f"model@sha256:{name * 64}") for name in "abc"}


@pytest.fixture(scope="module")
def prompts(real_model: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return list(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"])


def sampled(engine: Any, policy: str, prompts: Any, stops: tuple[int, ...] = (END,), **settings: Any) -> list[Any]:
    """Prompts and their completions."""
    config = GenerationConfig.model_validate({"num_generations": 4, "max_completion_length": 20, **settings})
    completions = engine.one(0, Engine.generate, str(POLICY[policy]), prompts, config, stops, 5).each()
    return list(zip((prompt for prompt in prompts for _ in range(config.num_generations)), completions, strict=True))


def differences(model: Any, samples: list[Any], temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the sampled tokens by plain ``transformers``, and those of the engine less these, in nats."""
    parts = []
    for prompt, completion in samples:
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        parts.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy())
    logps = np.concatenate(parts)
    return logps, np.concatenate([completion.logps for _, completion in samples]) - logps


def change(model: Any) -> None:
    """Move each weight by about 2 % of the deviation of its matrix."""
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.float().std() * torch.randn(parameter.shape, generator=noise))


def send(engine: Any, model: Any, policy: str) -> None:
    """As a trainer does, in buckets."""
    engine.all(Engine.begin_update)
    for bucket in to_buckets(WeightStream(model, rank=0, zero_stage=0).tensors()):
        engine.one(0, Engine.load_bucket, bucket)
    engine.all(Engine.end_update, str(POLICY[policy]), 1)


def test_an_engine_in_fp32_has_the_log_probabilities_of_transformers_also_after_new_weights(
    real_model: Path, real_machines: WarmMachines, prompts: Any
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model)
    with real_machines.engines(EngineRequest(Model(real_model, POLICY["a"]), 256)) as engine:
        assert np.abs(differences(model, sampled(engine, "a", prompts))[1]).max() < 1e-4
        tempered = sampled(engine, "a", prompts, temperature=0.7, num_generations=1)
        assert np.abs(differences(model, tempered, 0.7)[1]).max() < 1e-4
        change(model)
        assert np.abs(differences(model, tempered, 0.7)[1]).mean() > 0.1
        send(engine, model, "b")
        assert np.abs(differences(model, sampled(engine, "b", prompts))[1]).max() < 1e-4
        engine.one(0, Engine.load, real_model, str(POLICY["a"]))
        greedy = sampled(engine, "a", prompts, num_generations=1, temperature=0.0)
        [(prompt, answer), *_] = greedy
        tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)
        assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"
        also = sampled(engine, "a", [prompt], (END, int(answer.token_ids[3])), num_generations=1, temperature=0.0)
        assert also[0][1].token_ids.tolist() == answer.token_ids[:4].tolist(), "any of several stop tokens ends it"


def test_an_engine_of_bf16_weights_is_as_close_to_exact_log_probabilities_as_transformers(
    real_model: Path, real_machines: WarmMachines, prompts: Any, folder: Path
) -> None:
    """Exact are those of the same weights in fp32. In bf16 both are off by 0.04 nats on average, for it has logits from 16 to
    32 in steps of 1/8, which moves the mean of 330 such errors by a tenth. On a processor that does not multiply bf16, the
    engine computes in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(real_model).save_pretrained(folder / "model")
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    def check(policy: str) -> None:
        exact.load_state_dict(model.state_dict())
        samples = sampled(engine, policy, prompts)
        right, off = differences(exact, samples)
        if not cpu_multiplies_bf16():
            assert np.abs(off).max() < 1e-4
            return
        rounded, _ = differences(model, samples)
        assert np.abs(off).mean() < 1.5 * np.abs(rounded - right).mean()
        assert abs(off.mean()) < 0.02, "without bias"

    with real_machines.engines(EngineRequest(Model(folder / "model", POLICY["c"]), 256)) as engine:
        check("c")
        change(model)
        send(engine, model, "b")
        check("b")
