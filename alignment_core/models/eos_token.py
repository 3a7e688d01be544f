"""`eos_token` of a model: another token of its vocabulary becomes the end of sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignment_core.data.turn_end import eos_token_ids
from alignment_core.errors import UserError
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.saving import GENERATION_CONFIG, read_json, write_json


def check_in_vocabulary(tokenizer: Any, token: str) -> None:
    """Raise UserError for a text that is not one token of the vocabulary."""
    if token not in tokenizer.get_vocab():
        raise UserError(
            f"model.eos_token: the tokenizer's vocabulary has no token {token!r}; name one that exists, such as "
            f"{tokenizer.eos_token!r}"
        )


def set_eos_token(directory: Path, token: str | None, trust_remote_code: bool = False) -> None:
    """Make ``token`` the end of sequence of the model in ``directory``, in the files of its tokenizer and of its
    configurations. Sampling goes on to stop at earlier ones, too.

    Raises UserError for a text that is no token.
    """
    if token is None:
        return
    tokenizer = load_tokenizer(directory, trust_remote_code)
    check_in_vocabulary(tokenizer, token)
    token_id = tokenizer.convert_tokens_to_ids(token)
    earlier = [number for number in eos_token_ids(directory) if number != token_id]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            content = read_json(directory / name) | {"eos_token": token}
            (directory / name).write_text(json.dumps(content, indent=2))
    config = read_json(directory / "config.json")
    of_text = config.get("text_config", config)
    of_text["eos_token_id"] = token_id
    write_json(directory / "config.json", config)
    generation = directory / GENERATION_CONFIG
    settings = read_json(generation) if generation.is_file() else {}
    write_json(generation, settings | {"eos_token_id": [token_id, *earlier]})
