"""Which completions the rows of a selection are: a table in their order.

It is an output of its own, so that a data set with the same rows is the same artifact, whatever the scores that chose them.
"""

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


def write_origins_of_best(kept: Sequence[tuple[dict[str, Any], float]], folder: Path) -> None:
    """Of each row that a round added, after those of earlier rounds: the numbers of the prompt and of the sample in the round's
    rollouts, and its score."""
    import pyarrow as pa

    layout = pa.schema({"prompt": pa.int32(), "sample": pa.int32(), "score": pa.float32()})
    rows = [{"prompt": row["prompt"], "sample": row["sample"], "score": score} for row, score in kept]
    write_table(rows, layout, folder / ORIGINS)
