"""`verifier: reasoning_gym`: the library's own score of a completion for one of its prompts."""

from __future__ import annotations

import functools
import json
from typing import Any

from alignment_core.data.origins.reasoning_gym import from_label, library
from alignment_core.rewards.named import NamedVerifier

OPEN, CLOSE = "<answer>", "</answer>"


def verify(prompt: str, completion: str, label: str | None) -> float:
    """The score in [0, 1] of the answer: the content of the last ``<answer>…</answer>``, or else the whole completion.

    Raises ValueError for a label that is not of a row of `reasoning_gym`.
    """
    name, options, entry = from_label(label or "")
    _, tag, after = completion.rpartition(OPEN)
    answer = after.partition(CLOSE)[0] if tag else completion
    return float(_dataset(name, json.dumps(options)).score_answer(answer.strip(), entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return library().create_dataset(name, seed=0, size=1, **json.loads(options))


VERIFIER = NamedVerifier(function=f"{__name__}:verify", packages=("reasoning-gym",), check=library)
