"""Decodes completions in the process that samples them: in a stage's own process that would take most of its time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from alignment_core.data.completion_text import CompletionText, Texts
from alignment_core.data.turn_end import TurnEnd
from alignment_core.models.model_ref import Model


@dataclass(frozen=True)
class Decoding:
    """Decodes completions of one turn: plain data that travels to the process that samples."""

    model: Model
    """The model whose tokenizer has the tokens."""
    turn_end: TurnEnd
    keeps_special: bool = False
    """Whether :attr:`Texts.special` is needed, too."""

    def __call__(self, ids: np.ndarray, finish_reason: str) -> Texts:
        """The text of the tokens ``ids`` [T]."""
        plain, special = _decoders(self)
        return Texts(plain(ids, finish_reason), special(ids, finish_reason) if special else None)


@lru_cache(maxsize=1)
def _decoders(decoding: Decoding) -> tuple[CompletionText, CompletionText | None]:
    tokenizer = decoding.model.tokenizer()
    special = CompletionText(tokenizer, decoding.turn_end, skip_special_tokens=False)
    return CompletionText(tokenizer, decoding.turn_end), special if decoding.keeps_special else None
