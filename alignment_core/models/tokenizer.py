"""A tokenizer of single bytes: real, deterministic, offline, and small enough for models made from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment_core.data.turn_end import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 264
"""256 bytes and the special tokens, padded to a multiple of 8 so that embedding rows fill whole cache lines."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<user>", "<assistant>", "<system>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('roles are system, user and assistant, got ' ~ message['role']) }}"
    "{%- endif -%}"
    "{{ '<' ~ message['role'] ~ '>' ~ message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
"""`<user>…<assistant>…<eos>`, any number of turns, with or without a system message."""


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A fast tokenizer whose ids 0–255 are the bytes themselves and whose ids from 256 are the special tokens.

    Any text that UTF-8 can hold comes back unchanged from ``decode(encode(text))``. ``chat_template`` replaces the
    default one; :data:`PLAIN` leaves it out. Saving it twice writes the same bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unused = tuple(f"<unused{i}>" for i in range(VOCABULARY_SIZE - 256 - len(SPECIAL_TOKENS)))
    vocabulary = {_character_of_byte(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS + unused])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=None if chat_template == PLAIN else chat_template or CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # would eat the space before a full stop, and with it the round trip
    )


def _character_of_byte(byte: int) -> str:
    """The printable character that byte-level BPE writes for a byte (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
