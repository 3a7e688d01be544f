"""Rollouts and scores as Parquet: the columns, and reading them back in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.columns import array, column
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.errors import DataError
from alignment_core.files import write_whole
from alignment_core.rollout.images import digests_of

if TYPE_CHECKING:
    import pyarrow as pa

    from alignment_core.data.completion_text import CompletionText
    from alignment_core.inference.completions import Completion

SCORES = "scores.parquet"


def rollout_schema(with_images: bool = False) -> pa.Schema:
    """One row per completion. ``policy`` is the reference of the model that sampled it; ``messages``, ``tools`` and
    ``columns`` are the prompt's (see :class:`alignment_core.data.kinds.prompts.Prompts`), as are the digests of its images, a
    column that rollouts of text do not have."""
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    images = [(IMAGES, pa.list_(pa.string()))] if with_images else []
    return pa.schema(
        [
            ("prompt", pa.int32()),
            ("sample", pa.int32()),
            ("prompt_ids", ids),
            ("completion_ids", ids),
            ("logps", pa.list_(pa.float32())),
            ("finish_reason", pa.string()),
            ("prompt_text", pa.string()),
            ("completion_text", pa.string()),
            ("label", pa.string()),
            ("task", pa.string()),
            ("messages", pa.string()),
            ("tools", pa.string()),
            ("columns", pa.string()),
            ("source", pa.string()),
            ("policy", pa.string()),
            *images,
        ]
    )


def score_schema() -> pa.Schema:
    """One row per completion, in the rollouts' order; scores that were not computed, or have failed, are null.

    ``rewards`` holds the result of each reward, ``reward`` their total.
    """
    import pyarrow as pa

    return pa.schema(
        [
            ("prompt", pa.int32()),
            ("sample", pa.int32()),
            ("tokens", pa.int32()),
            ("finish_reason", pa.string()),
            ("reward", pa.float32()),
            ("rewards", pa.list_(pa.float32())),
            ("verifier", pa.float32()),
            ("policy_logp", pa.float32()),
            ("reference_logp", pa.float32()),
        ]
    )


def shard_rows(
    prompts: list[dict[str, Any]], first: int, completions: Sequence[Completion], text: CompletionText, policy: str
) -> list[dict[str, Any]]:
    """Rows of one shard, the same number for each prompt; ``first`` is the number of its first prompt."""
    size = len(completions) // len(prompts)
    groups = [completions[start : start + size] for start in range(0, len(completions), size)]
    return [
        {
            "prompt": first + index,
            "sample": sample,
            "prompt_ids": prompt["prompt_ids"],
            "completion_ids": completion.token_ids,
            "logps": completion.logps,
            "finish_reason": completion.finish_reason,
            "prompt_text": prompt["prompt"],
            "completion_text": text(completion.token_ids.tolist(), completion.finish_reason),
            "label": prompt["label"],
            "task": prompt["task"],
            "messages": prompt.get("messages"),
            "tools": prompt.get("tools"),
            "columns": prompt.get("columns"),
            "source": prompt["source"],
            "policy": policy,
            IMAGES: digests_of(prompt),
        }
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for sample, completion in enumerate(group)
    ]


def write_table(rows: list[dict[str, Any]], schema: pa.Schema, path: Path) -> None:
    """Write rows as Parquet, whole or not at all."""
    write_columns({name: [row.get(name) for row in rows] for name in schema.names}, schema, path)


def write_columns(columns: Mapping[str, Sequence[Any]], schema: pa.Schema, path: Path) -> None:
    """Write the columns of a schema as Parquet, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([array(columns[field.name], field.type) for field in schema], schema=schema)
    write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))


def read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """All rows of an artifact of rollouts, in the order of its shards; lists are arrays. Raises DataError if there are none."""
    import pyarrow.parquet as pq

    rows = [row for path in sorted(directory.glob("shard-*.parquet")) for row in _rows(pq.read_table(path))]
    if not rows:
        raise DataError("these rollouts hold no completions")
    return rows


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table, with an array for each list."""
    import pyarrow as pa

    columns = {
        field.name: column(table, field.name) if pa.types.is_list(field.type) else table.column(field.name).to_pylist()
        for field in table.schema
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def read_scores(directory: Path) -> list[dict[str, Any]]:
    """All rows of an artifact of scores, in the rollouts' order."""
    import pyarrow.parquet as pq

    return pq.read_table(directory / SCORES).to_pylist()
