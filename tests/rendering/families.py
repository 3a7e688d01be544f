"""Families of models: a small tokenizer with each one's algorithm and special tokens, and its chat template."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tests.rendering import templates, vocabularies
from tests.rendering.vocabularies import byte_level, sentencepiece_bpe, unigram

Token = str | AddedToken


TEXT_END = "<|endoftext|>"
CHATML = ("<|im_start|>", "<|im_end|>")
TAGS = ("<|system|>", "<|user|>", "<|assistant|>")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
COHERE = (
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>",
)  # fmt: skip
TURNS = ("<start_of_turn>", "<end_of_turn>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
GLM = ("[gMASK]", "<sop>", *TAGS, "<|observation|>")


@dataclass(frozen=True)
class Family:
    """A tokenizer and a chat template that belong together."""

    name: str
    vocabulary: Callable[[], Any]
    """The JSON of a tokenizer without special tokens, or a tokenizer of ``transformers`` that has them."""
    template: str | None
    special: tuple[Token, ...] = ()
    eos: str = "</s>"
    bos: str | None = None
    """Put before plain texts by the tokenizer; before conversations by the template."""
    pad: str | None = None
    end: str | None = None
    """The token that ends an assistant's turn; None if the template writes none."""
    stops: tuple[str, ...] = ()
    """``eos_token_id`` of generation_config.json, beside EOS."""
    system: bool = True
    """Whether the template takes a system message."""
    keeps_history: bool = True
    """Whether a turn is rendered in the same way once others follow."""
    ends_of_history: tuple[str, ...] = ()
    """Tokens that end a turn once others follow, where that is another one."""
    fast: bool = True
    """Whether the library tokenizers does the work, and not Python."""
    keeps_spaces: bool = True
    """Whether white space has tokens."""

    def __str__(self) -> str:
        return self.name

    @property
    def alternates(self) -> bool:
        """Whether the template refuses two messages of a user, one behind the other."""
        return "must alternate" in str(self.template)

    @functools.cached_property
    def tokenizer(self) -> Any:
        return build(self)

    def ids(self, *tokens: str | None) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(token) for token in tokens if token is not None]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """As generation_config.json has them."""
        return tuple(dict.fromkeys(self.ids(self.eos, *self.stops)))


def build(family: Family) -> Any:
    """A new tokenizer of the family."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = family.vocabulary()
    if not isinstance(vocabulary, str):
        vocabulary.chat_template = family.template
        return vocabulary
    backend = Tokenizer.from_str(vocabulary)
    names = [name for name in (family.bos, family.eos, family.pad, family.end) if name]
    tokens = {
        str(token.content if isinstance(token, AddedToken) else token): token for token in (*names, *family.special)
    }
    added = [
        token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False)
        for token in tokens.values()
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    if family.bos:
        backend.post_processor = processors.Sequence(
            [
                *([backend.post_processor] if backend.post_processor else []),
                processors.TemplateProcessing(
                    single=f"{family.bos} $A", special_tokens=[(family.bos, backend.token_to_id(family.bos))]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _from_sentencepiece(
    class_name: str, model_type: Any, prefix: bool, rule: str = "identity", named: bool = True, **options: Any
) -> Any:
    """A tokenizer of a class of ``transformers``, read from a model that the library sentencepiece trained.

    The ChatML tokens are symbols of that model; they are special tokens only if they are ``named`` beside it, too.
    """
    import transformers

    cls = getattr(transformers, class_name)
    special = {"extra_special_tokens": list(CHATML)} if named else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / cls.vocab_files_names["vocab_file"]
        file.write_bytes(vocabularies.sentencepiece_file(model_type, prefix, CHATML, rule))
        return cls.from_pretrained(folder, **options, **special)


def _of_class(class_name: str, vocabulary: str, **options: Any) -> Any:
    """A tokenizer of a class of ``transformers``, which sets up its own pre-tokenizer, from a vocabulary and its merges."""
    import transformers

    model = json.loads(vocabulary)["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    names = [name for name in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>") if name not in model["vocab"]]
    special = {name: number for number, name in enumerate(names, len(model["vocab"]))}
    return getattr(transformers, class_name)(
        vocab={**model["vocab"], **special}, merges=merges, extra_special_tokens=list(CHATML), **options
    )


def _byt5() -> Any:
    """Bytes, in Python."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0, extra_special_tokens=["<|im_start|>", "<|im_end|>"])


def stripped(*names: str, normalized: bool = False, **sides: bool) -> tuple[AddedToken, ...]:
    """Special tokens that take up white space beside them (``lstrip``, ``rstrip``), or are found in normalized text."""
    return tuple(AddedToken(name, special=True, normalized=normalized, **sides) for name in names)


def _bytes(family: str) -> Callable[[], str]:
    return lambda: byte_level(family)


def _pieces(prepend: Any, newline_split: bool = False) -> Callable[[], str]:
    return lambda: sentencepiece_bpe(prepend, newline_split)


def _unigram(prepend: Any, lower_case: bool = False) -> Callable[[], str]:
    return lambda: unigram(prepend, lower_case)


T = templates
OWN = [
    # SentencePiece with a prefix space
    Family("llama2", _pieces("first"), T.LLAMA_2, bos="<s>", end="</s>"),
    Family("llama2-legacy", _pieces("normalizer"), T.LLAMA_2, bos="<s>", end="</s>", pad="</s>"),
    Family("llama2-always", _pieces("always"), T.LLAMA_2, bos="<s>", end="</s>", pad="<unk>"),
    Family("llama2-chatml", _pieces("first"), T.chatml(), CHATML, bos="<s>", end="<|im_end|>", stops=("<|im_end|>",)),
    Family("llama2-chatml-legacy", _pieces("normalizer"), T.chatml(), CHATML, bos="<s>", end="<|im_end|>"),
    Family("added-not-special", _pieces("first"), T.chatml(),
           tuple(AddedToken(name, special=False, normalized=False) for name in CHATML), bos="<s>", end="<|im_end|>"),
    Family("mistral-v0.1", _pieces("normalizer"), T.MISTRAL_V1, bos="<s>", end="</s>"),
    Family("mistral-v0.3", _pieces("first"), T.MISTRAL_V3, ("[INST]", "[/INST]"), bos="<s>", end="</s>"),
    Family("mistral-v0.3-legacy", _pieces("normalizer"), T.MISTRAL_V3, ("[INST]", "[/INST]"), bos="<s>", end="</s>"),
    Family("zephyr", _pieces("normalizer"), T.tags("</s>", user_end="</s>"), bos="<s>", end="</s>", pad="</s>"),
    Family("vicuna", _pieces("normalizer"), T.VICUNA, bos="<s>", end="</s>", pad="<unk>"),
    Family("alpaca", _pieces("first"), T.ALPACA, bos="<s>", end="</s>"),
    Family("solar", _pieces("always"), T.SOLAR, bos="<s>", end="</s>"),
    Family("openchat", _pieces("normalizer"), T.OPENCHAT, ("</s>",), eos="<|end_of_turn|>", bos="<s>", end="<|end_of_turn|>"),
    Family("eos-between", _pieces("normalizer"), T.EOS_BETWEEN, bos="<s>"),
    Family("phi3", _pieces("normalizer"), T.PHI_3, stripped(*TAGS, "<|end|>", rstrip=True), eos=TEXT_END, bos="<s>",
           pad=TEXT_END, end="<|end|>", stops=("<|end|>", "<|assistant|>")),
    Family("minicpm", _pieces("first"), T.MINICPM, bos="<s>", end="</s>"),
    Family("baichuan", _pieces("never"), T.BAICHUAN, ("<reserved_106>", "<reserved_107>")),
    # SentencePiece without one
    Family("gemma", _pieces("never", True), T.GEMMA, TURNS, eos="<eos>", bos="<bos>", pad="<pad>", end="<end_of_turn>",
           stops=("<end_of_turn>",), system=False),
    Family("gemma-base-config", _pieces("never", True), T.GEMMA, TURNS, eos="<eos>", bos="<bos>", end="<end_of_turn>",
           system=False),
    Family("yi", _pieces("never"), T.chatml(), CHATML, eos="<|im_end|>", bos="<|startoftext|>", end="<|im_end|>"),
    Family("internlm2", _pieces("never"), T.chatml(T.BOS), CHATML, bos="<s>", end="<|im_end|>", stops=("<|im_end|>",)),
    # Byte-level BPE
    Family("gpt2-chatml", _bytes("gpt2"), T.chatml(), CHATML, eos=TEXT_END, pad=TEXT_END, end="<|im_end|>"),
    Family("gpt2-prefix-space", _bytes("gpt2_prefix_space"), T.chatml(), CHATML, eos=TEXT_END, end="<|im_end|>"),
    Family("gpt2-plain-marks", _bytes("gpt2_prefix_space"), T.DEEPSEEK_V2, eos="<｜end▁of▁sentence｜>",
           bos="<｜begin▁of▁sentence｜>", end="<｜end▁of▁sentence｜>"),
    Family("qwen2.5-base", _bytes("qwen2"), T.chatml(default_system="You are a helpful assistant."), CHATML, eos=TEXT_END,
           pad=TEXT_END, end="<|im_end|>"),
    Family("qwen2.5-instruct", _bytes("qwen2"), T.chatml(default_system="You are a helpful assistant."),
           (*CHATML, TEXT_END), eos="<|im_end|>", pad=TEXT_END, end="<|im_end|>", stops=(TEXT_END,)),
    Family("qwen3-thinking", _bytes("qwen2"), T.QWEN_3, (*CHATML, TEXT_END), eos="<|im_end|>", pad=TEXT_END,
           end="<|im_end|>", keeps_history=False),
    Family("smollm2", _bytes("starcoder"), T.chatml(default_system="You are SmolLM."), (*CHATML, TEXT_END),
           eos="<|im_end|>", bos="<|im_start|>", pad="<|im_end|>", end="<|im_end|>"),
    Family("qwen2-normalized", _bytes("qwen2"), T.chatml(), stripped(*CHATML, normalized=True), eos=TEXT_END,
           end="<|im_end|>"),
    Family("dolphin-lstrip", _bytes("gpt2"), T.chatml(), stripped(*CHATML, lstrip=True), eos=TEXT_END, end="<|im_end|>"),
    Family("dolphin-rstrip", _bytes("gpt2"), T.chatml(), stripped(*CHATML, rstrip=True), eos=TEXT_END, end="<|im_end|>"),
    Family("llama3-base", _bytes("llama3"), T.headers(*LLAMA_3[:3]), LLAMA_3, eos="<|end_of_text|>",
           bos="<|begin_of_text|>", end="<|eot_id|>"),
    Family("llama3-instruct", _bytes("llama3"), T.headers(*LLAMA_3[:3]), (*LLAMA_3, "<|end_of_text|>"), eos="<|eot_id|>",
           bos="<|begin_of_text|>", pad="<|end_of_text|>", end="<|eot_id|>", stops=("<|end_of_text|>", "<|eom_id|>")),
    Family("llama4", _bytes("o200k"), T.headers("<|header_start|>", "<|header_end|>", "<|eot|>"),
           ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|end_of_text|>"), eos="<|eot|>", bos="<|begin_of_text|>",
           end="<|eot|>"),
    Family("mistral-tekken", _bytes("o200k"), T.MISTRAL_TEKKEN, ("[INST]", "[/INST]"), bos="<s>", end="</s>"),
    Family("phi4-mini", _bytes("o200k"), T.PHI_4_MINI, (*TAGS, "<|end|>"), eos=TEXT_END, bos=None, pad=TEXT_END,
           end="<|end|>", stops=("<|end|>",)),
    Family("phi4", _bytes("o200k"), T.PHI_4, (*CHATML, "<|im_sep|>"), eos=TEXT_END, bos=None, pad=TEXT_END,
           end="<|im_end|>", stops=("<|im_end|>",)),
    Family("command-r", _bytes("starcoder"), T.COMMAND_R, COHERE, eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
           pad="<PAD>", end="<|END_OF_TURN_TOKEN|>"),
    Family("deepseek-v2", _bytes("deepseek"), T.DEEPSEEK_V2, eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>",
           end="<｜end▁of▁sentence｜>"),
    Family("deepseek-v3", _bytes("deepseek"), T.DEEPSEEK_V3, ("<｜User｜>", "<｜Assistant｜>"), eos="<｜end▁of▁sentence｜>",
           bos="<｜begin▁of▁sentence｜>", end="<｜end▁of▁sentence｜>"),
    Family("falcon3", _bytes("falcon"), T.tags(TEXT_END), TAGS, eos=TEXT_END, end=TEXT_END),
    Family("tulu3", _bytes("llama3"), T.TULU, eos="<|end_of_text|>", bos="<|begin_of_text|>", end="<|end_of_text|>"),
    Family("olmo2", _bytes("llama3"), T.tags(TEXT_END, head=T.BOS), eos=TEXT_END, bos=TEXT_END, end=TEXT_END),
    Family("stablelm", _bytes("gpt2"), T.tags(TEXT_END, user_end=TEXT_END), TAGS, eos=TEXT_END, pad=TEXT_END, end=TEXT_END),
    Family("dialogpt", _bytes("gpt2"), T.DIALOGUE, eos=TEXT_END, bos=TEXT_END, end=TEXT_END),
    Family("pythia-hh", _bytes("gpt2"), T.HUMAN_ASSISTANT, eos=TEXT_END),
    Family("granite", _bytes("starcoder"), T.GRANITE, ("<|start_of_role|>", "<|end_of_role|>"), eos="<|end_of_text|>",
           pad="<|end_of_text|>", end="<|end_of_text|>"),
    Family("glm4", _bytes("llama3"), T.GLM_4, GLM, eos=TEXT_END, pad=TEXT_END, stops=("<|user|>", "<|observation|>")),
    Family("exaone", _bytes("gpt2"), T.EXAONE, ("[BOS]", "[|system|]", "[|user|]", "[|assistant|]"), eos="[|endofturn|]",
           end="[|endofturn|]"),
    Family("kimi", _bytes("o200k"), T.KIMI, ("<|im_user|>", "<|im_middle|>", "<|im_assistant|>", "<|im_system|>", "<|im_end|>"),
           eos="[EOS]", bos="[BOS]", pad="[PAD]", end="<|im_end|>", stops=("<|im_end|>",)),
    Family("reka", _bytes("llama3"), T.REKA, ("<sep>",), eos=TEXT_END, end="<sep>", stops=("<sep>",)),
    Family("gpt-oss", _bytes("o200k"), T.HARMONY, (*HARMONY, TEXT_END), eos="<|return|>", pad=TEXT_END, end="<|return|>",
           stops=(TEXT_END, "<|call|>"), keeps_history=False, ends_of_history=("<|end|>",)),
    # Unigram, single characters, whole words
    Family("t5", _unigram("always"), T.INSTRUCTION_TUNED_T5, end="</s>", pad="<pad>"),
    Family("unigram-first-chatml", _unigram("first"), T.chatml(), CHATML, end="<|im_end|>"),
    Family("unigram-no-prefix", _unigram("never"), T.chatml(), CHATML, end="<|im_end|>"),
    Family("albert", _unigram("always", True), T.chatml(), CHATML, eos="[SEP]", bos="[CLS]", pad="<pad>", end="<|im_end|>"),
    Family("characters", vocabularies.characters, T.ALPACA.replace("{{ bos_token }}", ""), end="</s>"),
    Family("words", vocabularies.words, T.tags("</s>"), TAGS, end="</s>", keeps_spaces=False),
    # Classes of transformers
    Family("LlamaTokenizer", lambda: _from_sentencepiece("LlamaTokenizer", "bpe", True), T.chatml(), bos="<s>",
           end="<|im_end|>"),
    Family("LlamaTokenizer-user-defined", lambda: _from_sentencepiece("LlamaTokenizer", "bpe", True, named=False),
           T.chatml(), bos="<s>", end="<|im_end|>"),
    Family("LlamaTokenizer-legacy", lambda: _from_sentencepiece("LlamaTokenizer", "bpe", True, legacy=True), T.LLAMA_2,
           bos="<s>", end="</s>"),
    Family("LlamaTokenizer-no-prefix", lambda: _from_sentencepiece("LlamaTokenizer", "bpe", True, add_prefix_space=False),
           T.MISTRAL_V1, bos="<s>", end="</s>"),
    Family("CodeLlamaTokenizer", lambda: _from_sentencepiece("CodeLlamaTokenizer", "bpe", True), T.LLAMA_2, bos="<s>",
           end="</s>"),
    Family("XLMRobertaTokenizer", lambda: _from_sentencepiece("XLMRobertaTokenizer", "unigram", True, "nmt_nfkc"),
           T.chatml(), bos="<s>", pad="<pad>", end="<|im_end|>", keeps_spaces=False),
    Family("GPT2Tokenizer", lambda: _of_class("GPT2Tokenizer", byte_level("gpt2"), add_prefix_space=True, eos_token="<eos>",
                                              bos_token="<eos>", unk_token="<unk>"), T.chatml(), eos="<eos>", end="<|im_end|>"),
    Family("Qwen2Tokenizer", lambda: _of_class("Qwen2Tokenizer", byte_level("qwen2"), eos_token="<|im_end|>",
                                               pad_token="<pad>", unk_token="<unk>"), T.chatml(), eos="<|im_end|>",
           pad="<pad>", end="<|im_end|>"),
    Family("GemmaTokenizer", lambda: _of_class("GemmaTokenizer", sentencepiece_bpe("never", True)), T.chatml(T.BOS),
           eos="<eos>", bos="<bos>", pad="<pad>", end="<|im_end|>"),
    Family("GPTSw3Tokenizer", lambda: _from_sentencepiece("GPTSw3Tokenizer", "bpe", True), T.chatml(), eos=TEXT_END,
           bos="<s>", pad="<pad>", end="<|im_end|>", fast=False),
    Family("ByT5Tokenizer", _byt5, T.chatml(), pad="<pad>", end="<|im_end|>", fast=False),
]  # fmt: skip
