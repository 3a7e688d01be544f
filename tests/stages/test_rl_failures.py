"""Completions without a reward: in the trajectories with the reason, and not trained on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.errors import DataError
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.recipes import RlConfig
from alignment_core.recipes.sections.rl import TrajectoriesConfig
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.rollout import Rollout, to_batch
from alignment_core.rollout.sampling import SyncSampler
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.stages.rl.rewards import Rewards
from alignment_core.user_code.errors import Failed
from tests.rollout.rollouts import rollout

LATE = Failed("timeout", "gave no answer within 3 seconds")


def next_batch(rewards: list[list[Any]], **more: Any) -> tuple[list[Rollout], dict[str, float]]:
    """Rollouts of a step with two prompts of two completions, and metrics with cost. The engines do not matter here."""

    def complete(draws: range, version: int) -> list[Rollout]:
        return [
            rollout([True, True], group=draw, sample=sample, environment=LATE) for draw in draws for sample in range(2)
        ]

    config = {"prompts": "p.jsonl", "prompts_per_step": 2, "generation": {"num_generations": 2}, **more}
    section = RlConfig.model_validate({**config, "rewards": [{"urls": "http://a/"}] * len(rewards)})
    sources: Any = lambda rows: [[*column[: len(rows)]] for column in rewards]  # noqa: E731
    scoring = Rewards(section, sources, Stopwatch(), cost={})
    sampling: Any = SimpleNamespace(complete=complete)
    sampler = SyncSampler(sampling, scoring.add_rewards, sleeps_in_training=False)
    rollouts, metrics = scoring.next_batch(sampler, 0)
    return rollouts, {**metrics, **scoring.cost}


def test_a_completion_without_a_reward_is_kept_with_the_reason_and_not_trained_on(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rollouts, metrics = next_batch([[1.0, 0.5, LATE, LATE], [3.0, Failed("raised", "at 0x7f"), 4.0, LATE]])
    assert (metrics["failed_rewards"], metrics["prompts_used"]) == (3, 0.5)
    means = [metrics[f"rewards/endpoint_{number}/mean"] for number in range(2)]
    assert means == [0.75, 3.5], "of 1 and 0.5, and of 3 and 4"
    assert metrics["reward/missing_share"] == 0.75
    with closing(Trajectories(tmp_path / "steps", TrajectoriesConfig(), 1)) as written:
        written.write(0, rollouts, to_batch(rollouts[:1]))
    table = pq.read_table(tmp_path / "steps" / "step-000000.parquet")
    rows = {(row["group"], row["sample"]): row for row in table.to_pylist()}
    results = {place: (row["used"], row["reward"], row["rewards"], row["failures"]) for place, row in rows.items()}
    assert results == {
        (0, 0): (True, 4.0, [1.0, 3.0], None),
        (0, 1): (False, None, [0.5, None], [None, "raised"]),
        (1, 0): (False, None, [None, 4.0], ["timeout", None]),
        (1, 1): (False, None, [None, None], ["timeout", "timeout"]),
    }
    assert [rollout.used for rollout in rollouts] == [True, False, False, False], "trained ones come first"


def test_completions_without_a_reward_do_not_make_a_group_informative() -> None:
    rollouts, _ = next_batch([[1.0, LATE, 1.0, 0.0]], filter={"max_refills": 0})
    assert {(rollout.group, rollout.sample) for rollout in rollouts if rollout.used} == {(1, 0), (1, 1)}
    assert len(rollouts) == 4


def test_scores_decide_whether_a_prompt_teaches_and_extra_numbers_are_metrics_of_the_step() -> None:
    equal = [RewardValue(1.0, score, {"0": length}) for score, length in [(1.0, 4.0), (0.0, 2.0)]]
    differ = [RewardValue(reward, 0.5, {"deviation": 3.0}) for reward in (0.0, 1.0)]
    rollouts, metrics = next_batch([[*equal, *differ]], filter={"max_refills": 0})
    assert [rollout.used for rollout in rollouts] == [True, True, False, False]
    assert (metrics["extra_0"], metrics["extra_deviation"], metrics["rewards/endpoint/mean"]) == (3.0, 3.0, 0.75)
    assert "reward_deviation" not in metrics, "which is the deviation of all rewards"


def test_a_step_without_any_reward_is_an_error() -> None:
    with pytest.raises(DataError, match="step 0: no completion has a reward"):
        next_batch([[LATE] * 4])
