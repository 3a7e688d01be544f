"""Images of training rows: files beside the table, which every method's sequences name."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from alignment_core.models.microbatch import Images, distinct, pack
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.kto import Kto
from alignment_core.training.methods.sft import Sft
from alignment_core.training.step_data import StepData
from alignment_core.training.training_rows import images_by_row, read_rows, rows_before

IDS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
NAMES = [["a"], [], ["b", "c"]]


def _written(folder: Path, **columns: object) -> Path:
    table = folder / "train.parquet"
    pq.write_table(pa.table({**columns, "images": pa.array(NAMES, pa.list_(pa.string()))}), table)
    return table


def test_the_sequences_of_a_row_have_its_images(tmp_path: Path) -> None:
    table = _written(tmp_path, input_ids=IDS, loss_mask=[[1] * len(ids) for ids in IDS])
    expected = [tuple(str(tmp_path / "images" / name) for name in names) for names in NAMES]
    assert [row.sequences[0].images for row in read_rows(table, Sft())] == expected

    table = _written(tmp_path, prompt_ids=IDS, chosen_ids=IDS, rejected_ids=IDS, margin=[0.0] * 3)
    for row, images in zip(read_rows(table, Dpo(DpoLossConfig())), expected, strict=True):
        assert [sequence.images for sequence in row.sequences] == [images, images]


def test_a_mismatched_completion_keeps_the_images_of_its_prompt(tmp_path: Path) -> None:
    method = Kto(KtoLossConfig())
    table = _written(tmp_path, prompt_ids=IDS, completion_ids=IDS, label=[True, False, True])
    rows = list(read_rows(table, method))
    before = list(rows_before(table, method, rows, None))
    assert [row.sequences[0].images for row in before] == [row.sequences[0].images for row in rows]
    assert [len(row.sequences[0].images) for row in before] == [1, 0, 2]


def test_a_pack_has_images_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    """Lines are filled with the longest sequence first."""
    table = _written(tmp_path, input_ids=IDS, loss_mask=[[1] * len(ids) for ids in IDS])
    micro = pack(list(read_rows(table, Sft())), share_prefixes=False)
    assert micro.input_ids[0, :9].tolist() == [6, 7, 8, 9, 1, 2, 3, 4, 5]
    assert [Path(image).name for image in micro.images] == ["b", "c", "a"]


def test_pairs_with_equal_ids_and_other_images_are_distinct(tmp_path: Path) -> None:
    table = pa.table({"images": NAMES})
    images = images_by_row(table, tmp_path)
    assert images == [(Images([tmp_path / "images" / "a"]),), (), (Images(tmp_path / "images" / n for n in "bc"),)]
    pairs = [([1], [2], (), *of) for of in (images[0], images[1], images[0], images[2])]
    unique, places = distinct(pairs)
    assert len(unique) == 3
    assert places == [0, 1, 0, 2]
    assert isinstance(pickle.loads(pickle.dumps(unique[0]))[-1], Images)


def test_completions_have_the_images_of_their_prompts(tmp_path: Path) -> None:
    images = [Images([tmp_path / "a"]), Images()]
    data = StepData.of([[1], [2]], [[3], [4]], [[True], [True]], images=images)
    assert [row.sequences[0].images for row in data.rows()] == [(str(tmp_path / "a"),), ()]
    without = StepData.of([[1], [2]], [[3], [4]], [[True], [True]])
    assert [row.sequences[0].images for row in without.rows()] == [(), ()]
    assert np.array_equal(data.ids_N, without.ids_N)
