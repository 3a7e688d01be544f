"""Chat templates that TRL and vLLM ship, each with a tokenizer like its family's, and the tokenizers of Mistral 7B.

The package ``mistral_common``, which vLLM needs, holds these as they are.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.rendering import templates
from tests.rendering.families import CHATML, COHERE, HARMONY, LLAMA_3, OWN, TAGS, TEXT_END, TURNS, Family, stripped
from tests.rendering.vocabularies import byte_level, sentencepiece_bpe


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    return Path(str(spec.origin if spec else name)).parent


TRL = package("trl") / "chat_templates"
VLLM = package("vllm") / "transformers_utils" / "chat_templates"


def _read(name: str, folder: Path = TRL) -> str | None:
    file = folder / f"{name}.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _installed(name: str, vocabulary: Any, special: Any, **fields: Any) -> Family:
    return Family(f"trl-{name}", vocabulary, _read(name), special, **fields)


QWEN = {"special": (*CHATML, TEXT_END), "eos": "<|im_end|>", "pad": TEXT_END, "end": "<|im_end|>", "stops": (TEXT_END,)}
LFM = {
    "special": (*CHATML, TEXT_END),
    "eos": "<|im_end|>",
    "bos": "<|startoftext|>",
    "pad": "<|pad|>",
    "end": "<|im_end|>",
}
COMMAND = {
    "special": COHERE, "eos": "<|END_OF_TURN_TOKEN|>", "bos": "<BOS_TOKEN>", "pad": "<PAD>", "end": "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip
GEMMA = {
    "special": TURNS,
    "eos": "<eos>",
    "bos": "<bos>",
    "pad": "<pad>",
    "end": "<end_of_turn>",
    "stops": ("<end_of_turn>",),
}
PHI = {
    "special": stripped(*TAGS, "<|end|>", rstrip=True),
    "eos": TEXT_END, "bos": "<s>", "pad": TEXT_END, "end": "<|end|>", "stops": ("<|end|>", "<|assistant|>"),
}  # fmt: skip


def _qwen() -> str:
    return byte_level("qwen2")


def _gemma() -> str:
    return sentencepiece_bpe("never", True)


MISTRAL = package("mistral_common") / "data"


def _mistral(file: str) -> Any:
    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(MISTRAL / file, Path(folder) / "tokenizer.model")
        return LlamaTokenizer.from_pretrained(folder)


INSTALLED = [
    Family("mistral_common-v1", lambda: _mistral("tokenizer.model.v1"), templates.MISTRAL_V1, bos="<s>", end="</s>"),
    Family("mistral_common-v3", lambda: _mistral("mistral_instruct_tokenizer_240323.model.v3"), templates.MISTRAL_V3,
           bos="<s>", end="</s>"),
    Family("vllm-chatml", _qwen, _read("template_chatml", VLLM), (*CHATML, TEXT_END), eos="<|im_end|>", pad=TEXT_END),
    _installed("cohere", lambda: byte_level("starcoder"), **COMMAND),
    _installed("cohere2", lambda: byte_level("starcoder"), **COMMAND),
    _installed("gemma", _gemma, **GEMMA, system=False),
    _installed("gemma3", _gemma, **GEMMA),
    _installed("diffusion_gemma", _gemma, ("<|turn>", "<|channel>", "<channel|>"), eos="<eos>", bos="<bos>", pad="<pad>",
               end="<turn|>", stops=("<turn|>",)),
    _installed("gptoss", lambda: byte_level("o200k"), (*HARMONY, TEXT_END), eos="<|return|>", pad=TEXT_END,
               end="<|return|>", stops=(TEXT_END, "<|call|>"), keeps_history=False, ends_of_history=("<|end|>",)),
    _installed("lfm2", _qwen, **LFM),
    _installed("lfm2_v2", _qwen, **LFM),
    _installed("lfm2_2_5", _qwen, **LFM),
    _installed("lfm2_2_5_v2", _qwen, **LFM),
    _installed("llama3", lambda: byte_level("llama3"), (*LLAMA_3, "<|end_of_text|>"), eos="<|eot_id|>",
               bos="<|begin_of_text|>", end="<|eot_id|>", stops=("<|end_of_text|>", "<|eom_id|>")),
    _installed("muse_glimmer", lambda: byte_level("o200k"), ("<|start|>", "<|message|>", TEXT_END), eos="<|eot|>",
               bos="<|begin_of_text|>", end="<|eot|>", pad=TEXT_END),
    _installed("phi3", lambda: sentencepiece_bpe("normalizer"), **PHI),
    _installed("phi3_5", lambda: sentencepiece_bpe("normalizer"), **PHI),
    _installed("qwen2_5", _qwen, **QWEN),
    _installed("qwen2_5_vl", _qwen, **QWEN),
    _installed("qwen3", _qwen, **QWEN, keeps_history=False),
    _installed("qwen3_training", _qwen, **QWEN),
    _installed("qwen3_5_nothink_training", _qwen, **QWEN),
    _installed("qwen3_5_think_training", _qwen, **QWEN),
    _installed("qwen3_6", _qwen, **QWEN, keeps_history=False),
    _installed("qwen3_8", _qwen, **QWEN),
    _installed("qwen3_instruct_2507", _qwen, **QWEN),
    _installed("qwen3_vl", _qwen, **QWEN),
]  # fmt: skip

FAMILIES = [*OWN, *INSTALLED]
