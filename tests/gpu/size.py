"""Models and rows of the parts: as large as real ones in what matters on a GPU, tiny on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import Device
from alignment_core.models.microbatch import Row, TokenSequence
from alignment_core.models.model_ref import Model
from tests.gpu.report import CannotRun


@dataclass(frozen=True)
class Size:
    """Shape of a model, and lengths of its rows."""

    hidden: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""


SMALL = Size(hidden=64, layers=2, heads=2, groups=1, vocabulary=300, prompt=40, answer=24)
LARGE = Size(hidden=1024, layers=8, heads=16, groups=4, vocabulary=32_000, prompt=700, answer=300)


def size_on(device: str) -> Size:
    """The size for this kind of device."""
    return SMALL if device == "cpu" else LARGE


def the_device(kind: str) -> Device:
    """One device of this kind. Raises CannotRun if there is none."""
    if kind == "cpu":
        return Device("cpu", 1)
    if not torch.cuda.is_available():
        build = torch.__version__
        raise CannotRun(f"torch {build} sees no GPU" + (": it is the build for CPUs" if "+cpu" in build else ""))
    return Device("cuda", 1)


def config_of(size: Size, **more: Any) -> Any:
    """The configuration of a Qwen2 model of this size."""
    import transformers

    shape = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": 11 * size.hidden // 4,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return transformers.Qwen2Config(**{**shape, **more})


def new_model(size: Size, dtype: torch.dtype, seed: int = 0, **more: Any) -> Any:
    """A model with random weights, which are those of ``dtype`` also in fp32."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(size, **more), dtype=torch.float32)
    return model.to(torch.bfloat16).to(dtype).eval()


def stored_model(folder: Path, size: Size, seed: int = 0, **more: Any) -> Model:
    """A folder with such a model in bf16, and a tokenizer of bytes."""
    from alignment_core.models.saving import save_checkpoint
    from alignment_core.models.tokenizer import byte_tokenizer

    save_checkpoint(new_model(size, torch.bfloat16, seed, **more), None, folder)
    byte_tokenizer().save_pretrained(folder)
    return Model(folder, Reference("model", f"{seed:064x}"))


def grouped_rows(size: Size, prompts: int = 2, answers: int = 4) -> list[Row]:
    """Rows of one sequence each; those of a prompt share it."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        prompt = random.integers(2, size.vocabulary, size.prompt)
        for number in range(answers):
            ids = np.concatenate([prompt, random.integers(2, size.vocabulary, size.answer - number)])
            rows.append(Row(len(rows), (TokenSequence(ids, np.arange(len(ids)) >= len(prompt)),)))
    return rows


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of what was expected."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())
