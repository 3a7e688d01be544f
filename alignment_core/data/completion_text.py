"""The text of a completion: the sampled tokens, without those that end turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment_core.data.turn_end import TurnEnd


class CompletionText:
    """Decodes completions as rewards, environments and people read them."""

    def __init__(self, tokenizer: Any, turn_end: TurnEnd | None = None, skip_special_tokens: bool = True) -> None:
        """Without a ``turn_end`` every added token may end a turn. ``skip_special_tokens`` leaves all special tokens out."""
        self._tokenizer = tokenizer
        self._turn_end = turn_end
        self._skip = skip_special_tokens
        self._ends = {tokenizer.eos_token_id, *(turn_end.stop_ids if turn_end else tokenizer.added_tokens_decoder)}

    def __call__(self, ids: Sequence[int], finish_reason: str, mask: Sequence[bool] | None = None) -> str:
        """The turns one after the other; ``mask`` [T] says which of the ``ids`` [T] the policy sampled, all by default.

        ``finish_reason`` is that of the last turn: "length" if it was truncated.
        """
        own = [number for number, sampled in enumerate(mask) if sampled] if mask is not None else [*range(len(ids))]
        if not own:  # an episode that failed before the policy's first turn
            return ""
        last_of_turns = {
            place for place, following in zip(own, [*own[1:], len(ids)], strict=True) if following > place + 1
        }
        if finish_reason != "length":
            last_of_turns.add(own[-1])
        kept = [int(ids[place]) for place in own if place not in last_of_turns or int(ids[place]) not in self._ends]
        text = str(self._tokenizer.decode(kept, skip_special_tokens=self._skip))
        if self._turn_end:
            text = text.removeprefix(self._turn_end.space_before)
            text = text if finish_reason == "length" else text.removesuffix(self._turn_end.space_behind)
        return text


def with_special_tokens(rows: Sequence[dict[str, Any]], text: CompletionText) -> list[dict[str, Any]]:
    """Rows of completions whose ``completion_text`` has the special tokens that ``text`` keeps."""
    return [
        {**row, "completion_text": text(row["completion_ids"], row["finish_reason"], row.get("mask"))} for row in rows
    ]
