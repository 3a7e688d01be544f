"""The completions of a step as a file that is written beside the training."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rollout.advantages import Samples, step_data
from alignment_core.stages.rl import trajectories
from alignment_core.stages.rl.trajectories import Trajectories


def samples() -> Samples:
    """Two completions that are trained on, of which the first was told its second token, and one that is not."""
    masks = [[True, False, True], [True], [True, True]]
    return [
        {
            "group": number,
            "used": number < 2,
            "prompt_ids": [1, 2],
            "completion_ids": np.arange(len(mask), dtype=np.int32),
            "mask": np.array(mask),
            "rollout_logps": np.full(len(mask), -1.0, np.float32),
            "versions": np.zeros(len(mask), np.int32),
            "rewards": [0.5],
            "failures": None,
        }
        for number, mask in enumerate(masks)
    ]


def test_numbers_of_trained_tokens_lie_beside_them_and_those_of_others_are_not_there(tmp_path: Path) -> None:
    rows = samples()
    data = step_data(rows[:2])
    data.numbers["advantages"] = np.array([1.0, 2.0, 3.0], np.float32)
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 1)) as written:
        written.write(0, rows, data)
    table = pq.read_table(tmp_path / "steps" / "step-000000.parquet")
    assert table.column("advantages").to_pylist() == [[1.0, 0.0, 2.0], [3.0], None]
    assert table.column("completion_ids").to_pylist() == [[0, 1, 2], [0], [0, 1]]
    assert table.column("mask").to_pylist() == [[True, False, True], [True], [True, True]]
    assert table.column("prompt_ids").to_pylist() == [[1, 2]] * 3
    assert table.column("returns").null_count == 3, "nobody asked for them"


def test_what_could_not_be_written_is_raised_where_somebody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "step-000000.parquet")

    rows = samples()
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 3)) as written:
        monkeypatch.setattr(trajectories, "write_table", full)
        written.write(0, rows, step_data(rows[:2]))
        with pytest.raises(OSError, match="No space left"):
            written.settle()
        monkeypatch.undo()
        written.write(0, rows, step_data(rows[:2]))
        written.settle()
    assert [file.name for file in (tmp_path / "steps").iterdir()] == ["step-000000.parquet"]
