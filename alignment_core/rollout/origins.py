"""Which completions the rows of a selection are: a table beside the rows, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment_core.rollout.schemas import write_table

ORIGINS = "origins.parquet"


def write_origins_of_pairs(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], scores: Sequence[Any], folder: Path
) -> None:
    """Of each pair (chosen, rejected) of rows of the rollouts: the number of the prompt, the numbers of its samples, and their
    ``scores``, a pair of numbers each."""
    import pyarrow as pa

    numbers = {"prompt": pa.int32(), "chosen": pa.int32(), "rejected": pa.int32()}
    layout = pa.schema({**numbers, "chosen_score": pa.float32(), "rejected_score": pa.float32()})
    rows = [
        {
            "prompt": chosen["prompt"],
            "chosen": chosen["sample"],
            "rejected": rejected["sample"],
            "chosen_score": chosen_score,
            "rejected_score": rejected_score,
        }
        for (chosen, rejected), (chosen_score, rejected_score) in zip(pairs, scores, strict=True)
    ]
    write_table(rows, layout, folder / ORIGINS)


def write_origins_of_best(
    kept: Sequence[tuple[dict[str, Any], float]], earlier: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Of each row, first the ``earlier`` ones: how many rounds before this one it was sampled (``back``), the number of the
    prompt and of the sample in that round's rollouts, and its score."""
    import pyarrow as pa

    layout = pa.schema({"back": pa.int32(), "prompt": pa.int32(), "sample": pa.int32(), "score": pa.float32()})
    new = [{"back": 0, "prompt": row["prompt"], "sample": row["sample"], "score": score} for row, score in kept]
    write_table([*earlier, *new], layout, folder / ORIGINS)


def earlier_origins(folder: Path | None, rows: int) -> list[dict[str, Any]]:
    """The origins of the ``rows`` of an earlier round's selection, as this round has them; unknown ones, of data sets without
    such a table, are null."""
    import pyarrow.parquet as pq

    if folder is None or not (folder / ORIGINS).is_file():
        return [{}] * rows
    origins: list[dict[str, Any]] = pq.read_table(folder / ORIGINS).to_pylist()
    return [{**origin, "back": None if origin["back"] is None else origin["back"] + 1} for origin in origins]
