"""The stop tokens of a saved model: ``generate`` and vLLM stop where turns ended in training."""

from __future__ import annotations

from pathlib import Path

from alignment_core.data.template import Renderer
from alignment_core.data.turn_end import eos_token_ids
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.saving import GENERATION_CONFIG, read_json, write_json


def stop_at_turn_end(directory: Path, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
    """Add the end of a turn and EOS to ``eos_token_id`` in the configurations of a model folder, where they are missing.

    A base model names only its EOS, or no token at all, while a chat template may end turns with another one. Where there is
    a generation_config.json, ``generate`` reads only that, so it gets all of them. ``chat_template`` is that of the training
    data, if it is not the tokenizer's own.
    """
    tokenizer = load_tokenizer(directory, trust_remote_code)
    stop_ids = Renderer(tokenizer, chat_template, eos_token_ids(directory)).turn_end.stop_ids
    for file in (directory / GENERATION_CONFIG, directory / "config.json"):
        if not file.is_file():
            continue
        content = read_json(file)
        eos = content.get("eos_token_id")
        if eos is None and file.name != GENERATION_CONFIG:
            continue
        known = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if missing := [token for token in stop_ids if token not in known]:
            write_json(file, content | {"eos_token_id": [*missing, *known]})
