"""Training mode changes only the dropout of LoRA adapters and gradient checkpointing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from alignment_core.models.adapters import add_adapters
from alignment_core.models.microbatch import pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import LoraConfig
from tests.models.test_attention import FEW_EXPERTS, model_of, rows_of

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.3, "resid_pdrop": 0.3}
NOISY: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {**GPT2, "embd_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3, "word_embed_proj_dim": 32, "ffn_dim": 64},
    "mixtral": {"router_jitter_noise": 0.3, **FEW_EXPERTS},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "hidden_dropout": 0.3, **FEW_EXPERTS},
}
"""Architectures with randomness in training: layers, attention, embeddings, whole layers left out, routers."""
IDS = [np.arange(3, 40) % 60, np.arange(20, 45) % 60]


def of_transformers(model: Any) -> torch.Tensor:
    """Log-probabilities of the tokens of each sequence alone, by ``transformers`` in evaluation mode."""
    outputs = []
    with torch.no_grad():
        for ids in IDS:
            logps = torch.log_softmax(model.eval()(torch.from_numpy(ids)[None]).logits[0], -1)
            outputs.append(logps[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])])
    return torch.cat(outputs)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("architecture", NOISY)
def test_a_policy_that_trains_is_the_policy_that_samples(architecture: str, checkpointing: bool) -> None:
    """A pass in training mode equals ``transformers`` in evaluation mode, for any dropout in the
    configuration. So DPO begins at ln 2 and the ratio of PPO at 1."""
    model = model_of(architecture, **NOISY[architecture])
    expected = of_transformers(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed = PackedModel(model, "lm")
    for mode in (True, False, True):
        logps = run_packed(packed.train(mode), pack(rows_of(IDS), share_prefixes=packed.shares_prefixes))
        torch.testing.assert_close(logps.detach(), expected, atol=1e-5, rtol=1e-5)
    logps.sum().backward()


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_checkpointed_layers_are_computed_a_second_time_in_the_backward_pass(architecture: str) -> None:
    model, calls = model_of(architecture, **NOISY[architecture]), []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed = PackedModel(model, "lm").train()
    layers = model.model.layers if architecture == "llama" else model.model.decoder.layers
    layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for step in (1, 2):
        run_packed(packed, pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)).sum().backward()
        assert len(calls) == 2 * step
    with torch.no_grad():
        run_packed(packed.eval(), pack(rows_of(IDS), share_prefixes=packed.shares_prefixes))
    assert len(calls) == 5


def test_the_dropout_of_adapters_stays_on() -> None:
    model = model_of("llama", attention_dropout=0.3)
    config = LoraConfig(r=4, lora_dropout=0.5)
    add_adapters(model, model.get_output_embeddings(), config, seed=0, train_head=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    packed = PackedModel(model, "lm")
    micro = pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)
    first, second = (run_packed(packed.train(), micro).detach() for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(run_packed(packed.eval(), micro), run_packed(packed.eval(), micro))
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.5}, "the recipe's adapter settings are unchanged"


@pytest.mark.parametrize("architecture", NOISY)
def test_supervised_fine_tuning_can_ask_for_the_dropout_of_the_configuration(architecture: str) -> None:
    model = model_of(architecture, **NOISY[architecture])
    packed = PackedModel(model, "lm", dropout=True)
    micro = pack(rows_of(IDS), share_prefixes=packed.shares_prefixes)
    first, second = (run_packed(packed.train(), micro).detach() for _ in range(2))
    assert not torch.equal(first, second)
    assert model.config.to_dict().items() >= NOISY[architecture].items(), "the saved configuration is unchanged"
