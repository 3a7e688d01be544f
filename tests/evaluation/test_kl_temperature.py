"""The metric `kl`: both policies at the temperature, and with the rotary positions, with which completions were sampled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.stages import evaluate, score
from alignment_core.training.forward import ForwardJob


def with_peaks(folder: Path, path: Path) -> Any:
    """The tiny model with logits far enough apart that its distribution depends on the temperature."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.randn_like(model.model.norm.weight) * 15)
    model.save_pretrained(path)
    return model


def passes_here() -> Any:
    """Forward passes in this process."""

    def passes(model: Model, head: Any, _name: str, pairs: Any, temperature: float, longest: int | None) -> np.ndarray:
        job = ForwardJob(model, head, temperature=temperature, context=longest)
        return job.open(ResourcesConfig(), Device("cpu", 1)).run(pairs)

    return passes


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_a_policy_has_no_divergence_from_itself_at_any_temperature(
    temperature: float, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain ``transformers`` samples, and its scores are the log-probabilities of the sampled tokens, as the engine's are."""
    import torch

    model = with_peaks(tiny_model(), tmp_path / "peaked")
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2, 3]]).expand(16, 3)
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": temperature, "top_k": 0}
    output = model.generate(prompt, return_dict_in_generate=True, output_scores=True, **settings)
    completions = output.sequences[:, 3:]
    logps = torch.stack(output.scores, dim=1).log_softmax(-1).gather(-1, completions[:, :, None])[:, :, 0]
    rows = [
        {"prompt": number, "prompt_ids": np.array([1, 2, 3]), "completion_ids": ids.numpy(), "source": "test"}
        for number, ids in enumerate(completions)
    ]

    reference = Model(tmp_path / "peaked", Reference("model", "0" * 64))
    reference_logps = score._logps(passes_here(), reference, rows, score.ScoreConfig(temperature=temperature))

    scores = [
        {"prompt": number, "tokens": 12, "finish_reason": "length", "reward": None, "verifier": None}
        | {"policy_logp": float(logp.sum()), "reference_logp": reference_logp}
        for number, (logp, reference_logp) in enumerate(zip(logps, reference_logps, strict=True))
    ]
    monkeypatch.setattr(evaluate, "read_scores", lambda folder: folder)
    context: Any = SimpleNamespace(inputs={"scores": scores}, output=tmp_path, derive=lambda *_: 0)
    metrics = evaluate.run(context, evaluate.EvaluateConfig())
    assert metrics["kl"] == pytest.approx(0, abs=1e-3)
    if temperature != 1:  # the estimate of a reference at temperature 1 for the same completions
        other = score._logps(passes_here(), reference, rows, score.ScoreConfig())
        assert abs(float(logps.sum()) - sum(other)) / 16 > 0.1


def test_a_reference_has_the_rotary_positions_of_the_engine_that_sampled(tmp_path: Path) -> None:
    """With `longrope` vLLM decides by ``max_model_len``, prompt and longest completion, not by the sequence. The right value
    is that of plain ``transformers`` for the same sequence, continued to this length: nothing looks ahead."""
    import torch
    import transformers

    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 6.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": 20}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = transformers.Phi3Config(
        **sizes,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
        original_max_position_embeddings=20,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(shape).eval()
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() > 1 else 1
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 64, (12,))
    rows = [{"prompt_ids": ids[:4].numpy(), "completion_ids": ids[4:].numpy(), "source": "test"}]

    def logp(length: int) -> float:
        whole = torch.cat([ids, torch.ones(length - len(ids), dtype=torch.long)])
        with torch.no_grad():
            logps = model(whole[None]).logits[0].log_softmax(-1)
        return float(logps[torch.arange(3, 11), ids[4:]].sum())

    reference = Model(tmp_path, Reference("model", "0" * 64))
    for most, engine_length in ((8, 12), (26, 30)):  # below and above 20 tokens
        config = score.ScoreConfig(max_completion_length=most)
        (computed,) = score._logps(passes_here(), reference, rows, config)
        assert computed == pytest.approx(logp(engine_length), abs=1e-4)
    assert abs(logp(12) - logp(30)) > 1e-2
