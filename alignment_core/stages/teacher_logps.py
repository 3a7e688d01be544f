"""Stage: text and a teacher → the text with the teacher's top-k tokens and log-probabilities at each target."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.data.context import embedding_rows
from alignment_core.data.turn_end import pass_chat_template_on
from alignment_core.errors import DataError, NumericError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.files import write_whole

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK = 64
"""Rows per block of one rank; a kill loses at most one block per rank."""


class TeacherLogpsConfig(StageConfig):
    """What to compute with the ``model`` for a ``student``. The text is the input ``data``, demonstrations, or ``rollouts``,
    whose completions are the targets."""

    top_k: int
    bf16: bool = False
    """Whether to compute in bfloat16."""


def run(context: StageContext, config: TeacherLogpsConfig) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = _tables(context)
    source = "rollouts" if "rollouts" in context.inputs else "data"
    pass_chat_template_on(context.inputs[source], context.output)
    rows = train_rows = 0
    with context.machines.trainers(context.ticket) as trainers:
        for split, table in tables.items():
            outputs = _outputs(context, config, trainers, split, table)
            ids, logps = ([output[place].reshape(-1) for output in outputs] for place in (0, 1))
            if not all(np.isfinite(row).all() for row in logps):
                raise NumericError(f"the teacher's log-probabilities of the {split} rows are not finite")
            table = table.append_column("teacher_ids", pa.array(ids, pa.list_(pa.int32())))
            table = table.append_column("teacher_logps", pa.array(logps, pa.list_(pa.float32())))
            pq.write_table(table, context.output / f"{split}.parquet", compression="zstd")
            rows += len(table)
            train_rows += len(table) if split == "train" else 0
    return {"rows": rows, "train_rows": train_rows}


def _tables(context: StageContext) -> dict[str, pa.Table]:
    import pyarrow.parquet as pq

    if "rollouts" in context.inputs:
        return {"train": _of_rollouts(context)}
    files = {split: context.inputs["data"] / f"{split}.parquet" for split in ("train", "test")}
    tables = {split: pq.read_table(file) for split, file in files.items() if file.is_file()}
    if "train" not in tables:
        raise DataError("the data set holds no training rows")
    return tables


def _of_rollouts(context: StageContext) -> pa.Table:
    """Each completion as a demonstration, truncated ones included: the teacher has log-probabilities for these, too."""
    import pyarrow as pa

    from alignment_core.data.kinds.texts import KIND  # demonstrations have the same columns
    from alignment_core.data.tables import schema
    from alignment_core.rollout.schemas import read_rollouts

    rows = [
        {
            "input_ids": np.concatenate([row["prompt_ids"], row["completion_ids"]]),
            "loss_mask": np.repeat(np.array([0, 1], np.int8), [len(row["prompt_ids"]), len(row["completion_ids"])]),
            "text": row["prompt_text"] + row["completion_text"],
            "source": row["source"],
        }
        for row in read_rollouts(context.inputs["rollouts"])
        if len(row["completion_ids"])
    ]
    if not rows:
        raise DataError("the student's completions are all empty, so there is nothing to compare")
    return pa.Table.from_pylist(rows, schema(KIND.columns))


def _outputs(
    context: StageContext, config: TeacherLogpsConfig, trainers: Any, split: str, table: pa.Table
) -> list[Any]:
    """The teacher's outputs for each row; finished blocks are saved in the stage's progress."""
    from alignment_core.cluster.actor import call
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.ranks import open_job
    from alignment_core.training.teacher import Teacher, TeacherJob

    rows = Sft().rows(table)
    blocks = [rows[first : first + BLOCK] for first in range(0, len(rows), BLOCK)]
    files = [context.progress / f"{split}-{number:06d}.npz" for number in range(len(blocks))]
    left = [(number, block) for number, block in enumerate(blocks) if not files[number].is_file()]
    done = len(blocks) - len(left)
    if left:
        student = context.inputs.get("student")
        embeddings = embedding_rows(student) if student else None
        job = TeacherJob(context.model("model"), config.top_k, config.bf16, embeddings)
        ranks = open_job(trainers, job, context.resources)
        for number, outputs in ranks.spread((number, call(Teacher.run, block)) for number, block in left):
            ids, logps = (np.concatenate([output[place] for output in outputs]) for place in (0, 1))
            write_whole(files[number], partial(np.savez, ids=ids, logps=logps))
            done += 1
            context.report(done, len(blocks), "blocks")
    whole: list[Any] = []
    for block, file in zip(blocks, files, strict=True):
        with np.load(file) as kept:
            ends = np.cumsum([int(row.sequences[0].targets.sum()) for row in block])[:-1]
            whole += zip(np.split(kept["ids"], ends), np.split(kept["logps"], ends), strict=True)
    return whole


SHOWS = {"rows": "rows"}
STAGE = Stage(
    "teacher_logps",
    1,
    {"dataset": "dataset"},
    TeacherLogpsConfig,
    run,
    SHOWS,
    packages=("torch", "transformers"),
)
