"""Small tokenizers, trained on a few sentences, whose algorithms and settings are those of real families."""

from __future__ import annotations

import functools
import io
import json
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "How are you today? I am fine, thanks. What is the sum of 12 and 34? It is 46.",
    "The capital of France is Paris, and the capital of Japan is Tokyo. Do you know others?",
    "Yes, I do. Rome is the capital of Italy; Madrid is the capital of Spain.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Please answer in one word. Be brief and helpful. You are a helpful assistant.",
    "user: hello\nassistant: hello, how can I help you?\nsystem: think step by step\n",
    "First we add 3 and 4, which is 7. Then we multiply 7 by 2, which is 14.",
    "It's late. They're here, we've seen them, I'll go. Ça va? Grüße aus Köln.",
] * 3

Prepend = Literal["first", "always", "never"]

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of cl100k; Llama 3 groups digits by threes, Qwen 2 takes each alone."""
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Split = pre_tokenizers.Split


def _byte_level(add_prefix_space: bool = False, use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def _isolated(pattern: str) -> Any:
    return Split(Regex(pattern), behavior="isolated")


BYTE_LEVEL = {
    "gpt2": lambda: [_byte_level(use_regex=True)],
    "gpt2_prefix_space": lambda: [_byte_level(add_prefix_space=True, use_regex=True)],
    "llama3": lambda: [_isolated(GPT4 % "{1,3}"), _byte_level()],
    "qwen2": lambda: [_isolated(GPT4 % ""), _byte_level()],
    "o200k": lambda: [_isolated(O200K), _byte_level()],
    "starcoder": lambda: [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)],
    "falcon": lambda: [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        _byte_level(use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        _isolated("[0-9][0-9][0-9]"),
    ],
    "deepseek": lambda: [
        _isolated(r"\p{N}{1,3}"),
        _isolated("[一-龥぀-ゟ゠-ヿ]+"),
        _isolated(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        _byte_level(),
    ],
}
"""Pre-tokenizers of byte-level BPE, by family."""


@functools.cache
def byte_level(family: str, merges: int = 200) -> str:
    """Byte-level BPE as the JSON of a tokenizer; ``family`` is one of :data:`BYTE_LEVEL`."""
    tokenizer = Tokenizer(models.BPE())
    if family in ("qwen2", "cohere"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(BYTE_LEVEL[family]())
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return str(tokenizer.to_str())


@functools.cache
def sentencepiece_bpe(prepend: Prepend | Literal["normalizer"] = "first", newline_split: bool = False) -> str:
    """BPE over ▁ with byte fallback, as converters write it for Llama 2, Mistral and Gemma.

    ``prepend`` decides where a text gets a leading ▁: the schemes of Metaspace, or the normalizer of "legacy" files, which
    puts it before each piece of text between special tokens.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=320, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in state["vocab"] if token not in tokens]
    merges = [tuple(pair) for pair in state["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    elif newline_split:  # Gemma
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = Split(" ", behavior="merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if prepend == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    return str(tokenizer.to_str())


@functools.cache
def unigram(prepend: Prepend = "always", lower_case: bool = False) -> str:
    """Unigram over ▁, as T5 and ALBERT have it."""
    tokenizer = Tokenizer(models.Unigram())
    if lower_case:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    alphabet = [chr(code) for code in range(33, 127)] + list("\n▁çÇüßö")
    trainer = trainers.UnigramTrainer(
        vocab_size=260, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    return str(tokenizer.to_str())


@functools.cache
def characters() -> str:
    """A word list of single characters."""
    letters = sorted(set("".join(TEXT)) | {chr(code) for code in range(32, 127)})
    vocabulary = {token: number for number, token in enumerate(["<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = _isolated(r"[\s\S]")
    tokenizer.decoder = decoders.Fuse()
    return str(tokenizer.to_str())


@functools.cache
def words() -> str:
    """A word list, with spaces split off and lost."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return str(tokenizer.to_str())


@functools.cache
def sentencepiece_file(
    model_type: Literal["bpe", "unigram"], add_dummy_prefix: bool, pieces: tuple[str, ...], rule: str = "identity"
) -> bytes:
    """A ``tokenizer.model`` that the library sentencepiece trained; ``pieces`` are control symbols beside the usual three."""
    import sentencepiece

    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=file,
        model_type=model_type,
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name=rule,
        user_defined_symbols=list(pieces),
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return file.getvalue()
