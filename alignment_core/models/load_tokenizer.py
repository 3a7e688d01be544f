"""Tokenizers of model folders and of names on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment_core.imports import uncollected

TOKENIZER = "tokenizer.json"


def load_tokenizer(source: str | Path, trust_remote_code: bool = False, **place: Any) -> Any:
    """The tokenizer of a model's folder or name on the Hub, as ``transformers`` reads its tokenizer.json, if it has one.

    Beside a tekken.json ``transformers`` prefers that, by ``mistral_common``: a tokenizer of another library, which renders no
    chat template. ``place`` are further arguments of ``from_pretrained``, such as a revision.
    """
    with uncollected():
        from transformers import AutoTokenizer
        from transformers.utils import cached_file

    found = cached_file(source, TOKENIZER, _raise_exceptions_for_missing_entries=False, **place)
    library = {"mistral_format": False} if found else {}
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **library, **place)
