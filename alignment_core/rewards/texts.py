"""The text of a completion as rewards and environments see it where they ask for its special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SpecialTokenText:
    """The text of a policy's turns with its special tokens, but for those that ended the turns."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {*tokenizer.added_tokens_decoder, tokenizer.eos_token_id}
        """Tokens that may end a turn; not all tokenizers mark theirs as special."""

    def __call__(self, ids: Sequence[int], finish_reason: str, mask: Sequence[bool] | None = None) -> str:
        """The turns one after the other; ``mask`` [T] says which of the ``ids`` [T] the policy sampled, all by default.

        A turn ends with an added token unless it was truncated, as the last one with the ``finish_reason`` "length" was.
        """
        own = [True] * len(ids) if mask is None else [*map(bool, mask), False]
        kept, last = [], max((place for place, sampled in enumerate(own[: len(ids)]) if sampled), default=-1)
        for place, number in enumerate(map(int, ids)):
            ends_turn = place == last or (own[place] and not own[place + 1])
            is_closed = ends_turn and not (place == last and finish_reason == "length")
            if own[place] and not (is_closed and number in self._added):
                kept.append(number)
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


def with_special_tokens(rows: Sequence[dict[str, Any]], text: SpecialTokenText) -> list[dict[str, Any]]:
    """Rows of completions whose ``completion_text`` has the special tokens."""
    return [
        {**row, "completion_text": text(row["completion_ids"], row["finish_reason"], row.get("mask"))} for row in rows
    ]
