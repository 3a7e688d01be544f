"""Rows that are longer than the sequences a model takes: it would be trained on them without a word, and sample nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.data.formats import Purpose
from alignment_core.errors import DataError

if TYPE_CHECKING:
    import pyarrow


def context_length(model: Path) -> int | None:
    """The longest sequence that the model in this folder takes, in tokens, as far as its configuration says."""
    file = model / "config.json"
    return json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None


def check_context(table: pyarrow.Table, purpose: Purpose, most: int | None) -> None:
    """Raise DataError that names the first row of more than ``most`` tokens. A prompt leaves room for one more."""
    import numpy as np

    if most is None or not table.num_rows:
        return
    if purpose == "sft":
        tokens = _lengths(table, "input_ids")
    elif purpose == "preference":
        answers = np.maximum(_lengths(table, "chosen_ids"), _lengths(table, "rejected_ids"))
        tokens = _lengths(table, "prompt_ids") + answers
    else:
        tokens = _lengths(table, "prompt_ids") + 1
    longer = np.flatnonzero(tokens > most)
    if len(longer):
        first = int(longer[0])
        raise DataError(
            f"{table['source'][first]}: the row has {tokens[first]} tokens, and the model takes {most} "
            f"(max_position_embeddings), as {len(longer)} of {len(tokens)} rows: set max_length to {most} or less"
        )


def _lengths(table: pyarrow.Table, column: str) -> Any:
    import pyarrow.compute as pc

    return pc.list_value_length(table[column]).to_numpy()
