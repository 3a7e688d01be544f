"""Outputs of a model in bf16: its last layer's output, and everything after it in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.models.microbatch import pack
from alignment_core.models.packed import PackedModel, run_packed
from tests.models.test_attention import TINY, model_of, rows_of

IDS = [np.arange(3, 40) % 60, np.arange(20, 45) % 60]


def test_logits_are_divided_by_the_temperature_in_fp32() -> None:
    """log p = z/T − log Σ exp(z/T), with z as the head gives it; in bf16 the quotient has 8 digits of precision, so that logits
    of about 16 are off by up to 0.06."""
    model = model_of("llama").to(torch.bfloat16)
    model.lm_head.weight.data *= 100
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, _arguments, output: states.append(output))
    packed = PackedModel(model, "lm", with_entropy=True)
    states.clear()
    micro = pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)
    with torch.no_grad():
        logps_K, entropy_K = run_packed(packed, micro, temperature=0.7)
        logits = torch.nn.functional.linear(states[0].flatten(0, 1)[micro.predict_K], model.lm_head.weight)
    assert logits.dtype == torch.bfloat16
    expected = torch.log_softmax(logits.double() / 0.7, -1)
    chosen = expected[torch.arange(len(micro.labels_K)), micro.labels_K]
    torch.testing.assert_close(logps_K.double(), chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_K.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["score", "value"])
def test_a_reward_head_computes_in_fp32(head: Any) -> None:
    """score = w · h + b, with h as the last layer gives it, in bf16. Between 8 and 16 a number in bf16 is a multiple of 1/16:
    with a standard deviation of about 0.3 the scores of a prompt's completions tie often, and ties teach nothing."""
    config = transformers.LlamaConfig(**TINY, num_labels=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    random = np.random.default_rng(0)
    ids = [random.integers(1, 60, 12) for _ in range(200)]
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, _arguments, output: states.append(output))
    packed = PackedModel(model.eval(), head)
    micro = pack(rows_of(ids), share_prefixes=packed.shares_prefixes)

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        states.clear()
        with torch.no_grad():
            scores_found = run_packed(packed, micro)
        places = micro.last_S if head == "score" else micro.predict_K
        return scores_found, states[0].flatten(0, 1)[places]

    spread = scores()[0].float().std()
    model.score.weight.data *= 0.31 / spread
    model.score.bias = torch.nn.Parameter(torch.tensor([8.5], dtype=torch.bfloat16))
    scored, states_SH = scores()
    assert scored.dtype == torch.float32
    expected = states_SH.double() @ model.score.weight.double()[0] + 8.5
    torch.testing.assert_close(scored.double(), expected, atol=1e-5, rtol=1e-6)
    if head == "score":
        assert len(scored.bfloat16().unique()) < 60, "most of the 200 would tie"
        assert len(scored.unique()) > 195


def test_a_reward_head_learns_from_its_fp32_output() -> None:
    """The gradient of Σ w·h by w is Σ h."""
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.LlamaConfig(**TINY, num_labels=1), dtype=torch.bfloat16
    )
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _module, _arguments, output: states.append(output.detach()))
    packed = PackedModel(model, "score")
    states.clear()
    micro = pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)
    run_packed(packed, micro).sum().backward()
    expected = states[0].flatten(0, 1)[micro.last_S].double().sum(0)
    torch.testing.assert_close(model.score.weight.grad[0].double(), expected, atol=1e-2, rtol=1e-2)
