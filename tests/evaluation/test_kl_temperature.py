"""The metric `kl`: both policies at the temperature at which the completions were sampled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.models.handle import Model
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
    found = model.generate(prompt, return_dict_in_generate=True, output_scores=True, **settings)
    completions = found.sequences[:, 3:]
    logps = torch.stack(found.scores, dim=1).log_softmax(-1).gather(-1, completions[:, :, None])[:, :, 0]
    rows = [
        {"prompt": number, "prompt_ids": np.array([1, 2, 3]), "completion_ids": ids.numpy(), "source": "test"}
        for number, ids in enumerate(completions)
    ]

    def forward_passes(model: Model, head: Any, _name: str, pairs: Any, temperature: float) -> np.ndarray:
        return ForwardJob(model, head, temperature=temperature).open(ResourcesConfig(), Device("cpu", 1)).run(pairs)

    reference = Model(tmp_path / "peaked", Reference("model", "0" * 64))
    passes: Any = forward_passes
    reference_logps = score._logps(passes, reference, rows, temperature)

    scores = [
        {"prompt": number, "tokens": 12, "finish_reason": "length", "reward": None, "verifier": None}
        | {"policy_logp": float(one.sum()), "reference_logp": other}
        for number, (one, other) in enumerate(zip(logps, reference_logps, strict=True))
    ]
    monkeypatch.setattr(evaluate, "read_scores", lambda folder: folder)
    context: Any = SimpleNamespace(inputs={"scores": scores}, output=tmp_path, derive=lambda *_: 0)
    metrics = evaluate.run(context, evaluate.EvaluateConfig())
    assert metrics["kl"] == pytest.approx(0, abs=1e-3)
    if temperature != 1:  # what a reference at temperature 1 makes of the same completions
        other = score._logps(passes, reference, rows, 1.0)
        assert abs(float(logps.sum()) - sum(other)) / 16 > 0.1
