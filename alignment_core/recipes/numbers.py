"""Texts that may be numbers or names: `1e-5` is a number, `1234e567` may be the beginning of a reference."""

from __future__ import annotations

import math


class NumberText(str):
    """A number with an exponent and without a dot, which remains a text in fields of texts."""


def number_of(text: str) -> float | str:
    """The number; the text if it overflows."""
    number = float(text)
    return number if math.isfinite(number) else str(text)
