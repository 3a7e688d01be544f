"""Reward models that score completions, each in actors of its own or in the trainers' place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.errors import UserError
from alignment_core.rewards.failures import Answers

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward  # noqa: F401 (what the actors run belongs to a stage's key)

Pair = tuple[tuple[int, ...], tuple[int, ...]]
Rows = Sequence[dict[str, Any]]

FORWARD = "alignment_core.training.forward:Forward"
COMPARED = 64
"""Completions that are read again to compare tokenizers."""
BLOCK = 256
"""Completions per forward call of one actor: what a kill may cost, so not many."""


class Judge:
    """A reward that a group of :class:`~alignment_core.training.forward.Forward` actors gives."""

    def __init__(self, group: Any, wait: float) -> None:
        self.group, self.wait = group, wait

    def __call__(self, rows: Rows) -> Answers:
        pairs, places = distinct(rows)
        jobs = [(first, (pairs[first : first + BLOCK],)) for first in range(0, len(pairs), BLOCK)]
        found = dict(self.group.spread("run", jobs, timeout=self.wait))
        values = np.concatenate([found[first] for first, _ in jobs])[places]
        yield from enumerate(values.tolist())


def distinct(rows: Rows) -> tuple[list[Pair], list[int]]:
    """The different (prompt ids, completion ids) among ``rows``, and where each row's pair is among them."""
    asked = [(tuple(row["prompt_ids"]), tuple(row["completion_ids"])) for row in rows]
    pairs = list(dict.fromkeys(asked))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    return pairs, [numbers[pair] for pair in asked]


def check_tokenizer(model: Path, role: str, rows: Rows, trust_remote_code: bool) -> None:
    """The token ids of the policy must mean the same to the model that scores them. Raises UserError."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    for row in rows[:: max(1, len(rows) // COMPARED)]:
        read = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        if read != row["completion_text"]:
            raise UserError(
                f"the {role} has another tokenizer than the policy: it reads {read[:40]!r} where the "
                f"policy wrote {row['completion_text'][:40]!r}; give one with the policy's tokenizer"
            )
