"""Lengths of completions as reward functions, for attributes of conditional SFT and for shaping."""

from __future__ import annotations

from typing import Any


def words(rows: list[dict[str, Any]]) -> list[float]:
    """The number of words of each completion, which white space separates."""
    return [float(len(row["completion"].split())) for row in rows]
