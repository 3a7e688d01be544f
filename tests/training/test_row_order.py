"""`shuffle: false`: the order of the rows reaches the training, and not only the table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data.build import build, write
from alignment_core.data.pin import pin
from alignment_core.data.row_order import as_stored, is_shuffled
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.training.methods.sft import Sft
from alignment_core.training.training_rows import batch_of_step, first_rows, shuffles
from tests.training.test_trainer_ranks import open_job, train


def built(folder: Path, **fields: Any) -> Path:
    """The table of a data set of 20 rows, each one token longer than the one before."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "p", "completion": "{"x" * number}"}}\n' for number in range(1, 21)))
    config = DataConfig.model_validate({"path": str(rows), **fields})
    data = build(config, [pin(source) for source in config.sources], byte_tokenizer(), "demonstrations", seed=4)
    write(data, folder / "data")
    return folder / "data" / "train.parquet"


def test_rows_that_are_not_to_be_shuffled_are_taken_in_the_order_of_their_file(tmp_path: Path) -> None:
    table = built(tmp_path, shuffle=False)
    lengths = [len(ids) for ids in pq.read_table(table)["input_ids"].to_pylist()]
    assert all(longer == shorter + 1 for shorter, longer in pairwise(lengths))
    assert not shuffles(table)
    of_steps = [batch_of_step(step, 20, 8, 4, shuffles(table)) for step in range(6)]
    epoch = [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert of_steps == epoch + epoch, "in every epoch"
    assert first_rows(5, 20, 4, shuffles(table)) == [0, 1, 2, 3, 4], "those whose reference is computed"


def test_by_default_each_epoch_shuffles_rows_anew(tmp_path: Path) -> None:
    table = built(tmp_path)
    assert shuffles(table)
    assert pq.read_schema(table).metadata is None, "data sets of before keep their digests"
    first, second = (batch_of_step(epoch, 20, 20, 4, shuffles(table)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == [*range(20)]
    assert len({tuple(first), tuple(second), tuple(range(20))}) == 3


def test_columns_that_a_stage_adds_keep_the_order() -> None:
    """As a teacher's do: it appends to the table that it read."""
    table = pa.Table.from_pydict({"a": [1]}, as_stored(pa.schema([("a", pa.int64())])))
    assert not is_shuffled(table.append_column("b", pa.array([2])).schema)


def test_prompts_of_reinforcement_learning_are_drawn_in_their_order() -> None:
    prompts = [
        {"prompt_ids": [number], "prompt": str(number), "label": None, "task": None, "source": ""}
        for number in range(5)
    ]
    draws = PromptSchedule(prompts, GenerationConfig(num_generations=1), seed=4, shuffle=False)
    assert [draws.episodes(draw)[0].prompt["prompt"] for draw in range(7)] == ["0", "1", "2", "3", "4", "0", "1"]


@pytest.mark.slow
def test_every_step_of_a_trainer_takes_the_next_rows(make_job: Any, machines: Any, tables: Any, tmp_path: Path) -> None:
    """By hand: steps of 6, 6 and 2 of 14 rows; a step's normaliser is the number of its target tokens."""
    table = tables["sft"].replace_schema_metadata(as_stored(tables["sft"].schema).metadata)
    targets = [sum(mask[1:]) for mask in table["loss_mask"].to_pylist()]
    expected = [sum(targets[:6]), sum(targets[6:12]), sum(targets[12:])]
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), make_job(Sft(), table), tmp_path / "progress")
        (report,) = train(ranks, 6)
    assert [step.normaliser for step in report.each] == expected + expected
