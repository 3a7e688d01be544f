"""LoRA adapters, of ours and of others: ``PeftModel`` on the base model, and merged into it.

Expected: the output of `peft` before merging, as its own merge of a tied model changes both the embeddings and the head.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from alignment_core.errors import UserError
from alignment_core.models.adapters import add_adapters, merged, save_adapter
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import save_checkpoint
from alignment_core.models.tokenizer import CHAT_TEMPLATE
from alignment_core.recipes import LoraConfig
from alignment_core.stages.merge_adapter import pin_adapter, run
from tests.exports.conftest import TEXTS, edit, handle, logits

IDS = torch.arange(40)[None]
ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
TIED: dict[str, dict[str, Any]] = {
    "the head": {"target_modules": ["lm_head", "q_proj"]},
    "the head, with DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "the embeddings": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "the head, whole": {**ATTENTION, "modules_to_save": ["lm_head"]},
    "the embeddings, whole": {**ATTENTION, "modules_to_save": ["embed_tokens"]},
    "both, whole": {**ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
    "the embeddings, whole, tied": {**ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "some tokens": {**ATTENTION, "trainable_token_indices": [1, 2, 3]},
    "neither": ATTENTION,
}


def others_adapter(source: Path, folder: Path, rows: int | None = None, **config: Any) -> torch.Tensor:
    """Save an adapter with `peft`; returns the adapted model's logits. ``rows``: resize the embeddings first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that the embeddings are tied
        if rows:
            model.resize_token_embeddings(rows)
        torch.manual_seed(2)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **config)
        )
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad and "lora_" not in name:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(folder)
    return logits(adapted, IDS)


def merge(source: Path, adapter: Path, output: Path, **config: Any) -> Any:
    """The model that the stage writes, by its public loader."""
    context: Any = SimpleNamespace(inputs={}, output=output, model=lambda _: handle(source))
    output.mkdir()
    run(context, pin_adapter(str(adapter)).model_copy(update=config))
    return transformers.AutoModelForCausalLM.from_pretrained(output)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", TIED.values(), ids=TIED)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_merged_adapter_has_the_logits_of_peft(base, tmp_path, config, tied):
    source = base(tied)
    expected = others_adapter(source, tmp_path / "adapter", **config)
    beside = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(beside, IDS), expected)
    assert not torch.allclose(
        expected, logits(transformers.AutoModelForCausalLM.from_pretrained(source), IDS), atol=1e-3
    )
    merged = merge(source, tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits(merged, IDS), expected, atol=1e-3, rtol=1e-4)
    if config == ATTENTION:
        assert merged.config.tie_word_embeddings == tied
        torch.testing.assert_close(logits(beside.merge_and_unload(), IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_adapter_that_training_saves_is_one_for_peft(base, tmp_path, bits):
    if bits and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes (the extra `qlora`) is not installed")
    source, lora = base(), LoraConfig(r=4, load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = Model(source, handle(source).reference, bits=bits).load("lm", torch.float32)
    add_adapters(model, model.lm_head, lora, 7, train_head=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    expected, state = logits(model, IDS), model.state_dict()
    save_checkpoint(model, source, tmp_path / "merged", merged(model, state))
    save_adapter(model, state, lora, None, "model@sha256:1", tmp_path / "adapter")
    options: dict[str, Any] = {}
    if bits:
        content = json.loads((tmp_path / "adapter" / "quantization_config.json").read_text())
        options = {"quantization_config": transformers.BitsAndBytesConfig(**content)}
    public = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    for layer in public.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # it would compute in bfloat16 on some processors
    beside = peft.PeftModel.from_pretrained(public, tmp_path / "adapter")
    beside.train(bits == 8)  # in evaluation mode LLM.int8() rounds inputs, too
    torch.testing.assert_close(beside(IDS).logits.detach(), expected, atol=1e-4, rtol=1e-4)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole, IDS), expected, atol=1e-4, rtol=1e-4)


def own_tokenizer(source: Path, folder: Path, tokens: tuple[str, ...] = (), **changes: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_the_tokenizer_template_and_eos_of_an_adapter_are_those_of_the_merged_model(base, tmp_path):
    """As after fine-tuning a base model on chats: another EOS and a template are saved beside the adapter."""
    source = base()
    others_adapter(source, tmp_path / "adapter", **ATTENTION)
    own_tokenizer(
        source, tmp_path / "adapter", eos_token="<system>", chat_template={"default": "mine", "tool_use": "t"}
    )
    merged = merge(source, tmp_path / "adapter", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<system>", {"default": "mine", "tool_use": "t"})
    assert merged.generation_config.eos_token_id == [260, 257], "the adapter's, and the model's own"
    assert merged.config.eos_token_id == [260, 257]


def test_added_tokens_and_their_embeddings_come_with_an_adapter(base, tmp_path):
    source = base()
    tokenizer = own_tokenizer(source, tmp_path / "adapter", tokens=("<call>", "</call>"))
    expected = others_adapter(source, tmp_path / "adapter", rows=272, **ATTENTION)
    merged = merge(source, tmp_path / "adapter", tmp_path / "out")
    assert merged.config.vocab_size == 272
    torch.testing.assert_close(logits(merged, IDS), expected, atol=1e-4, rtol=1e-4)
    public = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert public("<call>")["input_ids"] == tokenizer("<call>")["input_ids"] == [264]


def test_a_tokenizer_with_more_tokens_than_the_merged_model_has_embeddings_is_refused(base, tmp_path):
    source = base()
    own_tokenizer(source, tmp_path / "adapter", tokens=("<call>",))
    others_adapter(source, tmp_path / "adapter", **ATTENTION)
    with pytest.raises(
        UserError, match="has 265 tokens, but the merged model has embeddings for 264: save the adapter with"
    ):
        merge(source, tmp_path / "adapter", tmp_path / "out")


def test_an_adapter_with_a_template_alone_keeps_the_models_tokenizer(base, tmp_path):
    source = base()
    others_adapter(source, tmp_path / "adapter", **ATTENTION)
    (tmp_path / "adapter" / "chat_template.jinja").write_text("mine")
    merge(source, tmp_path / "adapter", tmp_path / "out")
    merged, ours = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert merged.chat_template == "mine"
    assert merged(TEXTS)["input_ids"] == ours(TEXTS)["input_ids"]


def test_the_recipes_template_takes_precedence_over_the_adapters(base, tmp_path):
    source = base()
    others_adapter(source, tmp_path / "adapter", **ATTENTION)
    own_tokenizer(source, tmp_path / "adapter", chat_template="mine")
    merge(source, tmp_path / "adapter", tmp_path / "out", chat_template="the recipe's")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "the recipe's"


def test_an_adapter_without_a_tokenizer_keeps_the_models_tokenizer(base, tmp_path):
    source = base()
    edit(source / "generation_config.json", temperature=0.9)
    others_adapter(source, tmp_path / "adapter", **ATTENTION)
    merge(source, tmp_path / "adapter", tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
