"""Canonical JSON, digests and derived seeds: how this project derives names and numbers from content."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Serialise ``value`` to the one JSON text that stands for it: sorted keys, no spaces, UTF-8, floats by ``repr``.

    Raises TypeError for what JSON cannot hold and ValueError for NaN and infinities.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(value: Any) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 (64 hex digits) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(*parts: Any) -> int:
    """A seed in [0, 2**31) that follows from ``parts`` alone, such as (recipe seed, stage key, index)."""
    return int.from_bytes(hashlib.sha256(canonical_json(list(parts))).digest()[:4], "big") >> 1


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"keys of a canonical object are strings, got {sorted(map(repr, value))}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 2**53:
        return int(value)  # 1.0 and 1 are the same setting
    if hasattr(value, "model_dump"):  # of pydantic, which processes of the user's functions need not import
        return _plain(value.model_dump(mode="json"))
    if isinstance(value, Path):
        raise TypeError(f"canonical content must not contain a path: {value}")
    return value
