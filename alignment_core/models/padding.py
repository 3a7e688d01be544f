"""The padding token of a scoring model, by which ``transformers`` finds the end of a padded sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.saving import read_json, write_json


def set_padding(directory: Path, trust_remote_code: bool) -> None:
    """Make ``AutoModelForSequenceClassification`` score a padded batch as it scores each sequence of it alone.

    ``transformers`` takes the score at the last token that is not ``config.pad_token_id``. So that must be the tokenizer's
    padding token, and must not end sequences. A tokenizer whose padding token ends sequences, or that has none, gets another
    special token for it. If there is no other, the model has no padding token, and ``transformers`` raises for batches.
    """
    tokenizer = load_tokenizer(directory, trust_remote_code)
    ends = Renderer(tokenizer, eos_token_ids=eos_token_ids(directory)).turn_end.stop_ids
    pad = _padding_token(tokenizer, set(ends))
    config = read_json(directory / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part["pad_token_id"] = None if pad is None else tokenizer.convert_tokens_to_ids(pad)
    write_json(directory / "config.json", config)
    if pad not in (None, tokenizer.pad_token):
        for file in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
            if file.is_file():
                write_json(file, read_json(file) | {"pad_token": pad})


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _padding_token(tokenizer: Any, ends: set[int]) -> str | None:
    """The tokenizer's own padding token, or another special token that is not in ``ends``; None if there is none.

    Tokens with `pad` in their name are preferred; BOS and the unknown token come last.
    """
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return str(tokenizer.pad_token)
    template = str(tokenizer.chat_template)
    special = {number: token for number, token in _special_tokens(tokenizer).items() if number not in ends}
    last = (tokenizer.bos_token, tokenizer.unk_token)
    ranked = sorted(
        special,
        key=lambda number: (
            "pad" not in special[number].lower(),
            special[number] in last,
            special[number] in template,
            number,
        ),
    )
    return special[ranked[0]] if ranked else None
