"""Tokenizers of model folders and of names on the Hub, which may also have a file of Mistral's own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER, TEKKEN = "tokenizer.json", "tekken.json"


def load_tokenizer(source: str | Path, trust_remote_code: bool = False, **place: Any) -> Any:
    """The tokenizer of a model's folder or name on the Hub, as ``transformers`` reads its tokenizer.json, if it has one.

    Beside a tekken.json ``transformers`` prefers that, by ``mistral_common``: a tokenizer of another library, which renders no
    chat template. ``place`` are further arguments of ``from_pretrained``, such as a revision.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    whole, tekken = (
        cached_file(source, name, _raise_exceptions_for_missing_entries=False, **place) for name in (TOKENIZER, TEKKEN)
    )
    library = {"mistral_format": False} if whole else {}
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **library, **place)
    if whole and tekken:
        backend = tokenizer.backend_tokenizer
        if content := _with_pattern_of(Path(tekken), json.loads(backend.to_str())):
            backend.pre_tokenizer = type(backend).from_str(json.dumps(content)).pre_tokenizer
    return tokenizer


def keep_tokenizer_json(folder: Path) -> None:
    """Remove the tekken.json of a folder that has a tokenizer.json, too, because other loaders prefer it, as ``transformers``
    and vLLM's server do. A tokenizer.json that splits words otherwise gets its pattern."""
    whole, tekken = folder / TOKENIZER, folder / TEKKEN
    if not (whole.is_file() and tekken.is_file()):
        return
    if content := _with_pattern_of(tekken, json.loads(whole.read_text(encoding="utf-8"))):
        whole.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tekken.unlink()


def _with_pattern_of(tekken: Path, tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a tokenizer.json with the pattern by which Mistral's own library splits words; None if it has that.

    That of Mistral-Small-3.1 has Llama 3's, so that contractions and words with capitals inside have other tokens.
    """
    steps = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    pattern = json.loads(tekken.read_text(encoding="utf-8"))["config"].get("pattern")
    if steps[0].get("type") != "Split" or pattern in (None, steps[0]["pattern"].get("Regex")):
        return None
    steps[0]["pattern"] = {"Regex": pattern}
    return tokenizer
