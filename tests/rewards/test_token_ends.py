"""Where the steps of an answer end in its tokens: the prefix of the ids whose text first contains the step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.rewards.process_reward import text_lengths, token_ends

ANSWER = "Step 1: 2 + 3 = 5.\n\nSchritt 2: naïve café, 東京 🙂.\n\n  so  it is 5\n\n"


def metaspace_tokenizer() -> Any:
    """As SentencePiece with byte fallback: the first space of a text is not shown, and rare characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "<eos>",
        "▁",
        *sorted({*ANSWER, *"Schritt▁"} - {" ", "東", "🙂"}),
        "▁it",
        "it",
        "▁i",
        "▁so",
        "so",
    ]
    pieces = list(dict.fromkeys([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]))
    merges = [("▁", "i"), ("▁i", "t"), ("s", "o"), ("▁", "so"), ("i", "t")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def by_prefixes(tokenizer: Any, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The definition: decode every prefix. A prefix that ends within a character has only the text before it."""
    lengths = []
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        lengths.append(len(text.rstrip("\ufffd")))
    return [next((place for place, known in enumerate(lengths) if known >= end), len(ids) - 1) for end in ends]


@pytest.fixture(params=[byte_tokenizer, metaspace_tokenizer])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def ends_of_steps(text: str) -> list[int]:
    return [place + 2 for place in range(len(text)) if text.startswith("\n\n", place)]


def test_a_step_ends_with_the_token_that_completes_its_text(tokenizer: Any) -> None:
    ids = [*tokenizer(ANSWER * 3, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == ANSWER * 3
    ends = [*ends_of_steps(text), *range(1, len(text) + 1)]
    assert token_ends(tokenizer, ids, ends) == by_prefixes(tokenizer, ids, ends)
    assert text_lengths(tokenizer, ids)[-1] == len(text)


def test_tokens_that_are_no_text_do_not_shift_later_steps() -> None:
    tokenizer, generator = byte_tokenizer(), random.Random(0)
    for _ in range(50):
        ids = [generator.randrange(256) for _ in range(20)] + tokenizer("\n\nend")["input_ids"]
        text = tokenizer.decode(ids)
        assert token_ends(tokenizer, ids, [text.rindex("\n\n") + 2]) == [21]


def test_special_tokens_count_if_the_text_has_them() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    ids = tokenizer("a<think>b\n\nc")["input_ids"]
    assert token_ends(tokenizer, ids, [len("ab\n\n")]) == [4]
    assert token_ends(tokenizer, ids, [len("a<think>b\n\n")], skip_special_tokens=False) == [4]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def test_the_work_grows_with_the_tokens_and_not_with_their_square(tokenizer: Any) -> None:
    """At most 10 decodings of each token, for any length; all prefixes of n tokens have n / 2 for each."""
    for times in (4, 32):
        ids = tokenizer(ANSWER * times, add_special_tokens=False)["input_ids"]
        counting = Counting(tokenizer)
        token_ends(counting, ids, ends_of_steps(ANSWER * times))
        assert counting.decoded < 10 * len(ids)
