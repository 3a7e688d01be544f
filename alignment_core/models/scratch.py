"""A new model: random weights from a seed, and a tokenizer of single bytes."""

from __future__ import annotations

import threading
from pathlib import Path

from alignment_core.models.saving import save_checkpoint
from alignment_core.recipes import ScratchModel

_DRAWING = threading.Lock()
"""Torch has one random generator for all threads, and stages are threads of the run host."""


def create_model(shape: ScratchModel, chat_template: str | None, seed: int, directory: Path) -> int:
    """Write a freshly initialised causal language model to ``directory``; returns its number of parameters."""
    import torch
    import transformers

    from alignment_core.models.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer(chat_template)
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[shape.architecture]
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_checkpoint(model, None, directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
