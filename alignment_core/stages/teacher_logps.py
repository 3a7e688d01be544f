"""Stage: text and a teacher → the text with the teacher's top-k tokens and log-probabilities at each target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.data.context import embedding_rows
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import FOLDER, with_image_column
from alignment_core.data.turn_end import pass_chat_template_on
from alignment_core.errors import DataError, NumericError, UserError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.files import write_whole
from alignment_core.rollout.images import copy_images, digests_of, have_images

if TYPE_CHECKING:
    import pyarrow as pa

    from alignment_core.models.microbatch import Images, Row
    from alignment_core.training.teacher import Prediction

BLOCK = 64
"""Rows per block of one rank; a kill loses at most one block per rank."""
NO_IMAGES = (
    "distillation.teacher.model: the text has images, and {name} reads none: give an image-text model with the student's "
    "tokenizer"
)
"""Why a teacher is refused; ``name`` is its name in the sentence."""


class TeacherLogpsConfig(StageConfig):
    """What to compute with the ``model`` for a ``student``. The text is the input ``data``, demonstrations, or ``rollouts``,
    whose completions are the targets."""

    top_k: int
    bf16: bool = False
    """Whether to compute in bfloat16."""


def run(context: StageContext, config: TeacherLogpsConfig) -> dict[str, Any]:
    """Raises UserError for rows with images and a teacher that reads none, or reads them as other tokens than the student."""
    files = _files(context)
    source = context.inputs["rollouts" if "rollouts" in context.inputs else "data"]
    pass_chat_template_on(source, context.output)
    for file in files.values():
        _check_images(context, source, _image_rows(file, "input_ids"))
        copy_images(_image_rows(file), source, context.output)
    rows: dict[str, int] = {}
    with context.machines.trainers(context.ticket) as trainers:
        for split, file in files.items():
            parts = _parts(context, config, trainers, split, file, source)
            rows[split] = _write(file, _predictions(file, parts, split), context.output / f"{split}.parquet")
    return {"rows": sum(rows.values()), "train_rows": rows["train"]}


def _files(context: StageContext) -> dict[str, Path]:
    """The Parquet file of each split."""
    import pyarrow.parquet as pq

    if "rollouts" in context.inputs:
        file = context.progress / "rollouts.parquet"
        write_whole(file, partial(pq.write_table, _of_rollouts(context)))
        return {"train": file}
    files = {split: context.inputs["data"] / f"{split}.parquet" for split in ("train", "test")}
    files = {split: file for split, file in files.items() if file.is_file()}
    if "train" not in files:
        raise DataError("the data set holds no training rows")
    return files


def _of_rollouts(context: StageContext) -> pa.Table:
    """Each completion as a demonstration, truncated ones included: the teacher has log-probabilities for these, too."""
    import pyarrow as pa

    from alignment_core.data.kinds.texts import KIND  # demonstrations have the same columns
    from alignment_core.data.tables import schema
    from alignment_core.rollout.schemas import read_rollouts

    completions = read_rollouts(context.inputs["rollouts"])
    columns = with_image_column(KIND.columns, have_images(completions))
    rows = [
        {
            "input_ids": np.concatenate([row["prompt_ids"], row["completion_ids"]]),
            "loss_mask": np.repeat(np.array([0, 1], np.int8), [len(row["prompt_ids"]), len(row["completion_ids"])]),
            "text": row["prompt_text"] + row["completion_text"],
            "source": row["source"],
            IMAGES: digests_of(row),
        }
        for row in completions
        if len(row["completion_ids"])
    ]
    if not rows:
        raise DataError("the student's completions are all empty, so there is nothing to compare")
    return pa.Table.from_pylist(rows, schema(columns))


def _image_rows(file: Path, *columns: str) -> Iterator[dict[str, Any]]:
    """The digests of the images, and these columns, of each row of a Parquet file that has images."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file, pre_buffer=False) as table:
        if IMAGES in table.schema_arrow.names:
            for block in table.iter_batches(BLOCK, columns=[IMAGES, *columns]):
                yield from (row for row in block.to_pylist() if row[IMAGES])


def _check_images(context: StageContext, source: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Raise UserError for a teacher that does not read the images of the first block of ``rows`` as the student does."""
    first = list(islice(rows, BLOCK))
    if not first:
        return
    teacher = context.model("model")
    name = teacher.reference.short
    processor = teacher.image_processor()
    if processor is None:
        raise UserError(NO_IMAGES.format(name=name))
    for row in first:
        images = [source / FOLDER / digest for digest in row[IMAGES]]
        tokens = [processor.expand(processor.placeholder, [image]).count(processor.image_token_id) for image in images]
        places = row["input_ids"].count(processor.image_token_id)
        if places != sum(tokens):
            raise UserError(
                f"distillation.teacher.model: images of a row take {sum(tokens)} tokens for {name}, and {places} for the "
                "student: give a teacher whose processor makes as many of an image"
            )


def _parts(
    context: StageContext, config: TeacherLogpsConfig, trainers: Any, split: str, file: Path, source: Path
) -> list[Path]:
    """Files in the stage's progress with the teacher's predictions, one for each block of rows of a Parquet file."""
    import pyarrow.parquet as pq

    from alignment_core.cluster.actor import call
    from alignment_core.training.ranks import open_job, run_blocks
    from alignment_core.training.teacher import Teacher, TeacherJob
    from alignment_core.training.training_rows import table_has_images

    count = -(-pq.read_metadata(file).num_rows // BLOCK)
    parts = [context.progress / f"{split}-{number:06d}.npz" for number in range(count)]
    left = {number for number, part in enumerate(parts) if not part.is_file()}
    done = count - len(left)
    if left:
        student = context.inputs.get("student")
        embeddings = embedding_rows(student) if student else None
        job = TeacherJob(context.model("model"), config.top_k, config.bf16, embeddings, table_has_images(file))
        ranks = open_job(trainers, job, context.resources)
        numbered = ((number, block) for number, block in enumerate(_blocks(file)) if number in left)
        calls = ((number, call(Teacher.run, block, _images(block, source))) for number, block in numbered)
        for number, results in run_blocks(ranks, calls, context.resources):
            by_row = {row: prediction for result in results for row, prediction in result.items()}
            ids, logps = (np.concatenate([by_row[row][place] for row in sorted(by_row)]) for place in (0, 1))
            write_whole(parts[number], partial(np.savez, ids=ids, logps=logps))
            done += 1
            context.report(done, count, "blocks")
    return parts


def _predictions(file: Path, parts: list[Path], split: str) -> Iterator[Prediction]:
    """The teacher's prediction for each row of a Parquet file."""
    for block, part in zip(_blocks(file), parts, strict=True):
        with np.load(part) as saved:
            ids, logps = saved["ids"], saved["logps"]
        if not np.isfinite(logps).all():
            raise NumericError(f"the teacher's log-probabilities of the {split} rows are not finite")
        ends = np.cumsum([int(row.sequences[0].targets.sum()) for row in block])[:-1]
        yield from zip(np.split(ids, ends), np.split(logps, ends), strict=True)


def _images(rows: list[Row], source: Path) -> list[Images]:
    """The files of the images of each row in the artifact ``source``; empty if no row has one."""
    from alignment_core.models.microbatch import Images

    names = [[Path(image).name for image in row.sequences[0].images] for row in rows]
    return [Images(source / FOLDER / name for name in of_row) for of_row in names] if any(names) else []


def _blocks(file: Path) -> Iterator[list[Row]]:
    """The rows of a Parquet file in blocks."""
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.training_rows import read_rows

    rows = read_rows(file, Sft())
    while block := list(islice(rows, BLOCK)):
        yield block


def _write(source: Path, predictions: Iterator[Prediction], target: Path) -> int:
    """Write the rows of a Parquet file with the teacher's predictions, block by block. Returns their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from alignment_core.columns import array
    from alignment_core.data import tables

    types = {"teacher_ids": pa.list_(pa.int32()), "teacher_logps": pa.list_(pa.float32())}
    with pq.ParquetFile(source, pre_buffer=False) as table:
        layout = table.schema_arrow
        for name, type_ in types.items():
            layout = layout.append(pa.field(name, type_))
        with pq.ParquetWriter(target, layout, compression="zstd") as file:
            for block in table.iter_batches(tables.BLOCK):
                of_rows = zip(*islice(predictions, block.num_rows), strict=True)
                columns = [
                    array([values.reshape(-1) for values in column], type_)
                    for column, type_ in zip(of_rows, types.values(), strict=True)
                ]
                file.write_batch(pa.record_batch([*block.columns, *columns], layout))
        return int(table.metadata.num_rows)


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
