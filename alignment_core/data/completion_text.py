"""The text of a completion: the sampled tokens, without those that end turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from alignment_core.data.turn_end import TurnEnd


class CompletionText:
    """Decodes completions as rewards, environments and people read them."""

    def __init__(self, tokenizer: Any, turn_end: TurnEnd | None = None, skip_special_tokens: bool = True) -> None:
        """Without a ``turn_end`` every added token may end a turn. ``skip_special_tokens`` leaves all special tokens out."""
        self._tokenizer = tokenizer
        self._turn_end = turn_end
        self._skip = skip_special_tokens
        ends = {tokenizer.eos_token_id, *(turn_end.stop_ids if turn_end else tokenizer.added_tokens_decoder)}
        self._ends = np.array([end for end in ends if end is not None], np.int64)

    def __call__(
        self, ids: Sequence[int] | np.ndarray, finish_reason: str, mask: Sequence[bool] | np.ndarray | None = None
    ) -> str:
        """The turns one after the other; ``mask`` [T] says which of the ``ids`` [T] the policy sampled, all by default.

        ``finish_reason`` is that of the last turn: "length" if it was truncated.
        """
        ids_T = np.asarray(ids, np.int64)
        places = np.arange(len(ids_T)) if mask is None else np.flatnonzero(mask)
        if not len(places):  # an episode that failed before the policy's first turn
            return ""
        ends_turn = np.append(places[1:], len(ids_T)) > places + 1
        ends_turn[-1] |= finish_reason != "length"
        own = ids_T[places]
        kept = own[~(ends_turn & np.isin(own, self._ends))].tolist()
        text = str(self._tokenizer.decode(kept, skip_special_tokens=self._skip))
        if self._turn_end:
            text = text.removeprefix(self._turn_end.space_before)
            text = text if finish_reason == "length" else text.removesuffix(self._turn_end.space_behind)
        return text


class Texts(NamedTuple):
    """The text of one completion."""

    plain: str
    """Without special tokens."""
    special: str | None = None
    """With them; None if nothing reads it."""


def with_special_tokens(rows: Sequence[dict[str, Any]], text: CompletionText) -> list[dict[str, Any]]:
    """Rows of completions whose ``completion_text`` has the special tokens that ``text`` keeps: the row's ``special_text``, if
    it was decoded where it was sampled."""

    def shown(row: dict[str, Any]) -> str:
        known: str | None = row.get("special_text")
        return text(row["completion_ids"], row["finish_reason"], row.get("mask")) if known is None else known

    return [{**row, "completion_text": shown(row)} for row in rows]
