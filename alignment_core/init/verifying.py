"""Which verifier can say whether an answer is right, by what the labels look like."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.init.guess import PARSED
from alignment_core.rewards.verifiers.math import FINAL

ENOUGH = 0.9
"""Share of the rows whose labels have to look so."""
_NUMBER = re.compile(r"[\s$€£]*[-+]?[\d.,/\s^*()-]*\d[\d.,/\s^*()-]*%?\s*")


def is_final(label: str) -> bool:
    """Whether a label is an answer in mathematics, and nothing else."""
    label = label.strip()
    return bool(_NUMBER.fullmatch(label)) or (label[:1] == label[-1:] == "$" and len(label) > 2) or _boxed(label)


def _boxed(label: str) -> bool:
    return label.startswith(r"\boxed{") and label.endswith("}")


def ends_with_final(label: str) -> bool:
    """Whether a label is a worked solution that ends with such an answer."""
    _, marked, after = label.rpartition(FINAL)
    return (bool(marked) and is_final(after)) or r"\boxed{" in label


def has_tests(label: str) -> bool:
    """Whether a label holds tests of a program, in the form that `verifier: code` takes."""
    try:
        found = json.loads(label)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() in ({"tests"}, {"inputs", "outputs"})


def labels(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], most: int = PARSED) -> list[str]:
    """The labels of the first rows; an empty text where there is none."""
    found = []
    for row in rows[:most]:
        try:
            found.append(Fields(row, columns).label() or "")
        except ValueError:
            found.append("")
    return found


def verifier_of(found: Sequence[str], worked: bool = True) -> str | None:
    """The verifier for such labels; ``worked`` solutions count, or only bare answers do."""
    looks = {"code": has_tests, "math": lambda one: is_final(one) or (worked and ends_with_final(one))}
    for name, fits in looks.items():
        if found and sum(map(fits, found)) >= ENOUGH * len(found):
            return name
    return None
