"""The verifier that suits the labels of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.init.guess import PARSED_ROWS
from alignment_core.rewards.verifiers.math import behind_mark

SUITABLE_SHARE = 0.9
"""Share of the labels that a verifier must understand."""
_NUMBER = re.compile(r"[\s$€£]*[-+]?[\d.,/\s^*()-]*\d[\d.,/\s^*()-]*%?\s*")
_FORMULA = re.compile(r"\$.+\$|\\boxed\{.*\}", re.DOTALL)


def is_final(label: str) -> bool:
    """Whether a label is a bare mathematical answer."""
    return bool(_NUMBER.fullmatch(label.strip()) or _FORMULA.fullmatch(label.strip()))


def ends_with_final(label: str) -> bool:
    """Whether a label is a worked solution that ends with a mathematical answer."""
    answer = behind_mark(label)
    return (answer is not None and is_final(answer)) or r"\boxed{" in label


def has_tests(label: str) -> bool:
    """Whether a label holds tests of a program, as `verifier: code` takes them."""
    try:
        content = json.loads(label)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() in ({"tests"}, {"inputs", "outputs"})


def labels(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], count: int = PARSED_ROWS) -> list[str]:
    """The labels of the first ``count`` rows; "" for a row without one."""
    texts = []
    for row in rows[:count]:
        try:
            texts.append(Fields(row, columns).label() or "")
        except ValueError:
            texts.append("")
    return texts


def verifier_of(labels: Sequence[str], worked: bool = True) -> str | None:
    """The verifier that understands most of the labels; without ``worked``, bare answers only."""
    suits = {"code": has_tests, "math": lambda label: is_final(label) or (worked and ends_with_final(label))}
    for name, suitable in suits.items():
        if labels and sum(map(suitable, labels)) >= SUITABLE_SHARE * len(labels):
            return name
    return None
