"""Rows of preference pairs, shared by the reward model and DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment_core.columns import column
from alignment_core.models.microbatch import Row, TokenSequence

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


def pair_rows(table: pa.Table) -> list[Row]:
    """Each pair as a row of two sequences: chosen, then rejected. A missing margin is 0."""
    columns = (column(table, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    margins = [margin if margin == margin and margin is not None else 0.0 for margin in column(table, "margin")]
    return [
        Row(
            number,
            (
                TokenSequence.of_prompt_and_completion(prompt, chosen),
                TokenSequence.of_prompt_and_completion(prompt, rejected),
            ),
            margin,
        )
        for number, (prompt, chosen, rejected, margin) in enumerate(zip(*columns, margins, strict=True))
    ]


def split_pairs(values_S: Tensor) -> tuple[Tensor, Tensor]:
    """[2P] in the order chosen, rejected, chosen, … → chosen [P], rejected [P]."""
    return values_S[0::2], values_S[1::2]
