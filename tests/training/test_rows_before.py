"""The pass before a step: its rows are on disk, and held-out rows get no unused pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.disk_list import DiskList
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.training.kto_mismatch import mismatched
from alignment_core.training.methods.dpo_beta import DynamicDpo
from alignment_core.training.methods.kto import Kto
from alignment_core.training.trainer import Trainer
from alignment_core.training.training_rows import rows_before, table_has_images, training_rows
from tests.training.test_trainer_ranks import open_job, train


def test_mismatched_rows_lie_in_a_file_and_are_those_of_the_whole_table(tmp_path: Path) -> None:
    prompts, completions = [[1], [1], [2, 2], [3]], [[5], [6, 7], [8], [9]]
    table = pa.table({"prompt_ids": prompts, "completion_ids": completions, "label": [True, False, True, True]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert not table_has_images(tmp_path / "rows.parquet")
    method = Kto(KtoLossConfig())
    rows_found = rows_before(
        tmp_path / "rows.parquet", method, training_rows(tmp_path / "rows.parquet", method, None), tmp_path
    )
    assert isinstance(rows_found, DiskList)
    expected = [[*prompt, *other] for prompt, other in zip(prompts, mismatched(prompts, completions), strict=True)]
    assert [row.sequences[0].ids.tolist() for row in rows_found] == expected
    assert [row.number for row in rows_found] == [0, 1, 2, 3]


def test_mismatched_rows_of_one_question_have_other_images(tmp_path: Path) -> None:
    """Rows 0 and 1 are about one image, rows 2 and 3 about another."""
    prompts, completions, images = [[1]] * 4, [[5], [6], [7], [8]], [["red"], ["red"], ["blue"], ["blue"]]
    columns = {"prompt_ids": prompts, "completion_ids": completions, "label": [True] * 4, "images": images}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert table_has_images(tmp_path / "rows.parquet")
    method = Kto(KtoLossConfig())
    rows = training_rows(tmp_path / "rows.parquet", method, None)
    mismatched_rows = rows_before(tmp_path / "rows.parquet", method, rows, tmp_path)
    assert [row.sequences[0].ids.tolist() for row in mismatched_rows] == [[1, 7], [1, 8], [1, 5], [1, 6]]
    assert [Path(row.sequences[0].images[0]).name for row in mismatched_rows] == ["red", "red", "blue", "blue"]


@pytest.mark.parametrize(("alpha", "passes"), [(0.6, True), (0.0, False)])
def test_a_method_that_passes_its_training_rows_keeps_no_second_copy(
    alpha: float, passes: bool, tables: Any, tmp_path: Path
) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(tables["preference"], table)
    method = DynamicDpo(DpoLossConfig(beta_alpha=alpha, final_beta=None if alpha else 0.2))
    rows = training_rows(table, method, tmp_path)
    rows_found = rows_before(table, method, rows, tmp_path)
    assert rows_found is rows if passes else len(rows_found) == 0


@pytest.mark.slow
def test_held_out_rows_of_a_changing_beta_take_one_pass(make_job: Any, machines: Any, tmp_path: Path) -> None:
    class Counting(DynamicDpo):
        """Fails if all held-out rows, which are more than a batch has, pass through the model for their sums."""

        def sums_before(self, output: Any, batch: Any, reference_S: Any) -> Any:
            assert len(batch.rows) <= 6
            return super().sums_before(output, batch, reference_S)

    job = make_job(Counting(DpoLossConfig(beta_alpha=0.6)))
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, tmp_path / "progress", max_tokens_per_microbatch=10_000)
        train(ranks, 1)
        (report,) = ranks.all(Trainer.evaluate)
    assert report.normaliser == 14
    assert np.isfinite(report.sums["loss"])
