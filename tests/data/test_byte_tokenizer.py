"""The byte tokenizer: every text round-trips, every byte is its own id, and its files are deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from alignment_core.models.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_text_with_special_tokens_and_spaces_before_stops_comes_back() -> None:
    text = "a <eos> .  n't <user>é\x00\r\n"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_ids_of_plain_text_are_its_utf8_bytes() -> None:
    assert TOKENIZER.encode("Äh\n") == list("Äh\n".encode())


def test_vocabulary_is_padded_to_a_multiple_of_eight() -> None:
    assert len(TOKENIZER) == 264
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (256, 257)


def test_chat_template_marks_turns_and_closes_answers() -> None:
    rendered = TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == "<system>Be brief.<user>1+1?<assistant>2<eos><user>2+2?<assistant>"


def test_chat_template_can_be_replaced() -> None:
    assert byte_tokenizer("x").apply_chat_template(CHAT, tokenize=False) == "x"


def test_saved_files_are_deterministic_and_load_to_the_same_tokenizer(tmp_path: Path) -> None:
    def save(name: str) -> dict[str, bytes]:
        byte_tokenizer().save_pretrained(tmp_path / name)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}

    assert save("a") == save("b")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "Grüße , <eos>"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.apply_chat_template(CHAT, tokenize=False) == TOKENIZER.apply_chat_template(CHAT, tokenize=False)
