"""Numbers that look like names: `1e-5` is a number, and `1234e567` may be the beginning of a reference."""

from __future__ import annotations

import math


class NumberText(str):
    """A number with an exponent and without a dot, as it was written: a text where a text is needed, else a number."""


def number_of(text: str) -> float | str:
    """The number; the text where it is larger than any."""
    number = float(text)
    return number if math.isfinite(number) else str(text)
