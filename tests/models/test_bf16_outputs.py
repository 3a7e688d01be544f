"""What a model in bf16 gives: its last layer's output, and everything after it in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.training.batches import pack
from tests.models.test_attention import model_of, rows_of

IDS = [np.arange(3, 40) % 60, np.arange(20, 45) % 60]


def test_logits_are_divided_by_the_temperature_in_fp32() -> None:
    """log p = z/T − log Σ exp(z/T), with z as the head gives it; in bf16 the quotient has 8 digits of precision, so that logits
    of about 16 are off by up to 0.06."""
    model = model_of("llama").to(torch.bfloat16)
    model.lm_head.weight.data *= 100
    heads: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _arguments, output: heads.append(output))
    packed = PackedModel(model, "lm", with_entropy=True)
    heads.clear()
    micro = pack(rows_of(IDS), share=packed.shares)
    with torch.no_grad():
        logps_K, entropy_K = run_packed(packed, micro, temperature=0.7)
    (logits,) = heads
    assert logits.dtype == torch.bfloat16
    expected = torch.log_softmax(logits[0].double() / 0.7, -1)
    chosen = expected[torch.arange(len(micro.labels_K)), micro.labels_K]
    torch.testing.assert_close(logps_K.double(), chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_K.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)
