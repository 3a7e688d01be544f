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
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout import trajectories
from alignment_core.rollout.rollout import Rollout, to_batch
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.user_code.errors import Failed
from tests.rollout.rollouts import rollout

LATE = Failed("timeout", "gave no answer within 3 seconds")


def rollouts() -> list[Rollout]:
    """Two completions that are trained on, the first with an observation as its second token, and one that is not."""
    masks = [[True, False, True], [True], [True, True]]
    return [
        rollout(
            mask,
            group=number,
            used=number < 2,
            prompt_ids=[1, 2],
            logps=np.where(mask, -1.0, 0.0).astype(np.float32),
            rewards={"a": 0.5, "b": RewardValue(1.5), "c": None if number else LATE},
        )
        for number, mask in enumerate(masks)
    ]


def test_trajectories_have_numbers_only_for_trained_tokens(tmp_path: Path) -> None:
    rows = rollouts()
    data = to_batch(rows[:2])
    data.numbers["advantages"] = np.array([1.0, 2.0, 3.0], np.float32)
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 1)) as written:
        written.write(0, rows, data)
    table = pq.read_table(tmp_path / "steps" / "step-000000.parquet")
    assert table.column("advantages").to_pylist() == [[1.0, 0.0, 2.0], [3.0], None]
    assert table.column("completion_ids").to_pylist() == [[0, 1, 2], [0], [0, 1]]
    assert table.column("mask").to_pylist() == [[True, False, True], [True], [True, True]]
    assert table.column("prompt_ids").to_pylist() == [[1, 2]] * 3
    assert table.column("rollout_logps").to_pylist() == [[-1.0, 0.0, -1.0], [-1.0], [-1.0, -1.0]]
    assert table.column("returns").null_count == 3, "there is no critic"
    assert table.column("rewards").to_pylist() == [[0.5, 1.5, None]] * 3
    assert table.column("failures").to_pylist() == [[None, None, "timeout"], None, None]
    assert table.column("used").to_pylist() == [True, True, False]


def test_a_failed_write_is_raised_on_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "step-000000.parquet")

    rows = rollouts()
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 3)) as written:
        monkeypatch.setattr(trajectories, "write_columns", full)
        written.write(0, rows, to_batch(rows[:2]))
        with pytest.raises(OSError, match="No space left"):
            written.settle()
        monkeypatch.undo()
        written.write(0, rows, to_batch(rows[:2]))
        written.settle()
    assert [file.name for file in (tmp_path / "steps").iterdir()] == ["step-000000.parquet"]
