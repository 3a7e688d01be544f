"""Rows that are longer than the sequences a model takes: it would be trained on them without a word, and sample nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.data.formats import Purpose
from alignment_core.errors import DataError

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)
COUNTED_BY_VLLM = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of rotary positions of which vLLM takes ``max_position_embeddings`` as it is."""
KNOWN = ("default", "linear", "dynamic", "proportional", "mrope", *COUNTED_BY_VLLM)


def context_length(model: Path) -> int | None:
    """As :func:`longest_trained`, of the model in this folder."""
    file = model / "config.json"
    return longest_trained(json.loads(file.read_text())) if file.is_file() else None


def longest_trained(shape: dict[str, Any]) -> int | None:
    """The longest sequence, in tokens, that a model with this ``config.json`` is trained on, as far as it says.

    With rotary positions that are scaled, that is what they are scaled to; None, with a warning, for a scaling of a type that
    is not known, whose model may take more than ``max_position_embeddings``.
    """
    most = shape.get("max_position_embeddings")
    if most is None:
        return None
    for rope in _scalings(shape):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in KNOWN:
            log.warning("the model's rope type %r is not known, so no row is too long for it", kind)
            return None
        original = rope.get("original_max_position_embeddings") or shape.get("original_max_position_embeddings")
        if kind != "default":
            most = max(most, int((original or shape["max_position_embeddings"]) * (rope.get("factor") or 1)))
    return most


def longest_sampled(shape: dict[str, Any]) -> int | None:
    """The longest sequence that vLLM takes of such a model: it multiplies ``max_position_embeddings`` by the factor of those
    scalings only that do not already count in it."""
    most = shape.get("max_position_embeddings")
    factors = [
        rope.get("factor") or 1
        for rope in _scalings(shape)
        if (rope.get("rope_type") or rope.get("type") or "default") not in COUNTED_BY_VLLM
    ]
    return most if most is None or "gemma3" in shape.get("model_type", "") else int(most * max(factors, default=1))


def _scalings(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of rotary positions, as Transformers names them since 5 and before: for all layers, or by their type."""
    found = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return []
    nested = [one for one in found.values() if isinstance(one, dict)]
    return nested or [found]


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
