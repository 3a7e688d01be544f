"""Rows that a model cannot read: longer than its context (training would accept them silently, and sampling would return
nothing), or with tokens that it has no embeddings for (any pass over them would fail)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.errors import DataError, UserError

if TYPE_CHECKING:
    from alignment_core.data.kinds import Lengths

log = logging.getLogger(__name__)
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of the context in a ``config.json``. The second is that of GPT-2, GPT-J, CodeGen and GPTBigCode, the third of MPT and
DBRX."""
COUNTED_BY_VLLM = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of rotary positions whose factor ``max_position_embeddings`` includes, for vLLM."""
NOT_SCALED_BY_VLLM = "dynamic"
"""vLLM accepts longer sequences, but its table of positions ends at ``max_position_embeddings``: it would read past its end."""
KNOWN = ("default", "linear", "dynamic", "proportional", "mrope", *COUNTED_BY_VLLM)


def context_length(model: Path) -> int | None:
    """:func:`longest_trained` of the model in this folder."""
    file = model / "config.json"
    return longest_trained(json.loads(file.read_text())) if file.is_file() else None


def longest_trained(shape: dict[str, Any]) -> int | None:
    """Context length, in tokens, of a model with this ``config.json``, or of its part for text; None if that does not tell it.

    Scaled rotary positions extend it. None, with a warning, for an unknown type of scaling, because such a model may take more
    than ``max_position_embeddings``.
    """
    shape = _text_part(shape)
    context = _positions(shape)
    if context is None:
        return None
    longest = context
    for rope in _scalings(shape):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in KNOWN:
            log.warning("the model's RoPE type %r is unknown, so rows are not checked against its context", kind)
            return None
        original = rope.get("original_max_position_embeddings") or shape.get("original_max_position_embeddings")
        if kind != "default":
            longest = max(longest, int((original or context) * (rope.get("factor") or 1)))
    return longest


def longest_sampled(shape: dict[str, Any]) -> int | None:
    """The longest sequence that vLLM can sample with such a model: vLLM multiplies ``max_position_embeddings`` by the factors
    of scalings that it does not already include."""
    shape = _text_part(shape)
    longest = _positions(shape)
    factors = [
        rope.get("factor") or 1
        for rope in _scalings(shape)
        if (rope.get("rope_type") or rope.get("type") or "default") not in (*COUNTED_BY_VLLM, NOT_SCALED_BY_VLLM)
    ]
    if longest is None or "gemma3" in shape.get("model_type", ""):
        return longest
    return int(longest * max(factors, default=1))


def _text_part(shape: dict[str, Any]) -> dict[str, Any]:
    return {**shape, **(shape.get("text_config") or {})}


def _positions(shape: dict[str, Any]) -> int | None:
    return next((shape[name] for name in NAMES if shape.get(name)), None)


def _scalings(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of rotary positions, as Transformers names them since 5 and before: for all layers, or by their type."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    nested = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    return nested or [rope]


def check_context(rows: Sequence[Sequence[Lengths]], context: int | None, source: Callable[[int], str]) -> None:
    """Raise DataError for rows with a sequence of more than ``context`` tokens, with the ``source`` (of a row's number) of the
    first one. A prompt leaves room for one more token."""
    if context is None:
        return
    tokens = [max(head + (1 if tail is None else tail) for head, tail in sequences) for sequences in rows]
    longer = [number for number, count in enumerate(tokens) if count > context]
    if longer:
        raise DataError(
            f"{source(longer[0])}: the row has {tokens[longer[0]]} tokens, but the model takes at most {context} "
            f"(max_position_embeddings); {len(longer)} of {len(tokens)} rows are too long: set max_length to {context} or less"
        )


def embedding_rows(model: Path) -> int | None:
    """The number of token ids that the model in this folder has embeddings for; None if its config.json does not tell it."""
    file = model / "config.json"
    shape = json.loads(file.read_text()) if file.is_file() else {}
    rows = (shape.get("text_config") or shape).get("vocab_size")
    return rows if isinstance(rows, int) else None


def check_embedded(row: Mapping[str, Any], embeddings: int | None, token: Callable[[int], str]) -> None:
    """Raise UserError for a row whose columns of token ids, arrays named ``…_ids``, have one beyond the ``embeddings``.
    ``token`` gives the text of an id.

    A tokenizer may have more tokens than its model, such as images' of a text model, as long as no row has them.
    """
    if embeddings is None:
        return
    largest = max((int(ids.max(initial=0)) for name, ids in row.items() if name.endswith("_ids")), default=0)
    if largest >= embeddings:
        raise UserError(
            f"{row['source']}: the row has the token {token(largest)!r} with the id {largest}, but the model has embeddings "
            f"for {embeddings} tokens: its tokenizer was extended alone; resize the model, too "
            "(`model.resize_token_embeddings(len(tokenizer))`), and save it"
        )
