"""Completions without a reward: in the trajectories with the reason, and out of what is trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.errors import DataError
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.recipes import RlConfig
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.advantages import Samples, step_schema
from alignment_core.rollout.schemas import write_table
from alignment_core.rollout.sync_sampler import SyncSampler
from alignment_core.stages.rl.reward_step import Rewarding
from alignment_core.user_code.errors import Failed

LATE = Failed("timeout", "gave no answer within 3 seconds")


def experience(rewards: list[list[float | Failed]], **more: Any) -> tuple[Samples, dict[str, float]]:
    """Of a step with two prompts of two completions; what samples has nothing to do with this. Metrics and cost beside it."""

    def complete(draws: range, version: int) -> Samples:
        return [
            {
                "group": draw,
                "sample": sample,
                "prompt_ids": [1],
                "completion_ids": [2, 3],
                "mask": np.ones(2, bool),
                "versions": np.zeros(2, np.int32),
                "rollout_logps": [0.0, 0.0],
                "tokens_left": 254,
                "finish_reason": "stop",
                "environment": LATE,  # what rows of environments hold of them
            }
            for draw in draws
            for sample in range(2)
        ]

    config = {"prompts": "p.jsonl", "prompts_per_step": 2, "generation": {"num_generations": 2}, **more}
    section = RlConfig.model_validate({**config, "rewards": [{"urls": "http://a/"}] * len(rewards)})
    rewarding = Rewarding(section, lambda rows: [[*one[: len(rows)]] for one in rewards], Stopwatch(), cost={})
    sampling: Any = SimpleNamespace(complete=complete)
    samples, metrics = rewarding.experience(SyncSampler(sampling, rewarding.of, sleeps=False), 0)
    return samples, {**metrics, **rewarding.cost}


def test_a_completion_without_a_reward_is_kept_with_the_reason_and_not_trained_on(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    samples, metrics = experience([[1.0, 0.5, LATE, LATE], [3.0, Failed("raised", "at 0x7f"), 4.0, LATE]])
    assert metrics["failed_rewards"] == 3
    assert (metrics["reward_0"], metrics["reward_1"], metrics["prompts_used"]) == (1.0, 3.0, 0.5)
    path = tmp_path / "step.parquet"
    write_table(samples, step_schema(), path)
    rows = {(row["group"], row["sample"]): row for row in pq.read_table(path).to_pylist()}
    found = {place: (row["used"], row["reward"], row["rewards"], row["failures"]) for place, row in rows.items()}
    assert found == {
        (0, 0): (True, 4.0, [1.0, 3.0], None),
        (0, 1): (False, None, [0.5, None], [None, "raised"]),
        (1, 0): (False, None, [None, 4.0], ["timeout", None]),
        (1, 1): (False, None, [None, None], ["timeout", "timeout"]),
    }
    assert [row["used"] for row in samples] == [True, False, False, False], "those that are trained on come first"


def test_what_has_no_reward_takes_no_part_in_whether_a_prompt_teaches() -> None:
    samples, _ = experience([[1.0, LATE, 1.0, 0.0]], filter={"max_refills": 0})
    assert {(row["group"], row["sample"]) for row in samples if row["used"]} == {(1, 0), (1, 1)}
    assert len(samples) == 4


def test_scores_decide_whether_a_prompt_teaches_and_extra_numbers_are_metrics_of_the_step() -> None:
    equal = [RewardValue(1.0, score, {"0": length}) for score, length in [(1.0, 4.0), (0.0, 2.0)]]
    differ = [RewardValue(reward, 0.5, {"deviation": 3.0}) for reward in (0.0, 1.0)]
    samples, metrics = experience([[*equal, *differ]], filter={"max_refills": 0})
    assert [row["used"] for row in samples] == [True, True, False, False]
    assert (metrics["extra_0"], metrics["extra_deviation"], metrics["reward_0"]) == (3.0, 3.0, 0.75)
    assert "reward_deviation" not in metrics, "which is the deviation of all rewards"


def test_a_step_without_any_reward_is_said() -> None:
    with pytest.raises(DataError, match="step 0: no completion has a reward"):
        experience([[LATE] * 4])
