"""`rl.loss.mask_truncated_completions`: as in TRL 1.16, whose `completion_mask` becomes 0 for such completions after the
advantages were computed of all rewards.

Five tokens of room. Group 0 has the rewards 1, 0 and 2, the last of a truncated completion: mean 1, advantages 0, -1 and 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from alignment_core.errors import DataError
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.losses.policy import aggregation_normaliser, aggregation_weights
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig, RlConfig, TrajectoriesConfig
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.advantages import add_advantages, reasoning_step_rewards
from alignment_core.rollout.rollout import Rollout, to_batch
from alignment_core.rollout.trajectories import Trajectories
from alignment_core.stages.rl.rewards import Rewards
from tests.rollout.rollouts import rollout
from tests.stages.rl_runs import RESOURCES, rows_of, run_rl, section_of

MASKS = [[True, False, True], [True] * 5, [True, True, False, True, True]]
"""The first has an observation, the second ends by itself at the limit, and the third is truncated."""
ROOM = 5


def section(mask: bool = True) -> RlConfig:
    return RlConfig.model_validate(
        {
            "prompts": "prompts.jsonl",
            "rewards": [{"verifier": "checks.py:right"}],
            "generation": {"max_completion_length": ROOM},
            "loss": {"mask_truncated_completions": mask},
        }
    )


def rewarded(mask: bool = True, **fields: Any) -> list[Rollout]:
    ends = ["stop", "stop", "length"]
    rollouts = [
        rollout(
            of_policy,
            sample=number,
            used=True,
            finish_reason=ends[number],
            tokens_left=ROOM - len(of_policy),
            logps=np.where(of_policy, -1.0 - number, 0.0).astype(np.float32),
            rewards={"right": [1.0, 0.0, 2.0][number]},
            **fields,
        )
        for number, of_policy in enumerate(MASKS)
    ]
    sources: Any = None  # the rewards are there already
    return Rewards(section(mask), sources, Stopwatch(), cost={}).add_totals(rollouts)


def test_a_truncated_completion_counts_in_its_group_and_is_not_trained_on() -> None:
    batch = to_batch(rewarded())
    add_advantages(batch, [1.0, 0.0, 2.0], AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    assert batch.lengths_S.tolist() == [2, 5, 0]
    assert batch.numbers["advantages"].tolist() == [0.0] * 2 + [-1.0] * 5  # without the third they were 0.5 and -0.5
    assert batch.numbers["rollout_logps"].tolist() == [-1.0] * 2 + [-2.0] * 5
    unmasked = to_batch(rewarded(mask=False))
    add_advantages(unmasked, [1.0, 0.0, 2.0], AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    assert unmasked.numbers["advantages"].tolist() == [0.0] * 2 + [-1.0] * 5 + [1.0] * 4


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
def test_its_tokens_leave_the_mean_over_tokens_and_its_sequence_stays_in_that_over_sequences(aggregation: Any) -> None:
    """TRL's `dapo`, `grpo` and `dr_grpo` on padded tensors, for losses of 1, 2, … of the tokens."""
    mask_ST = torch.zeros(3, ROOM)
    for row, of_policy in enumerate(MASKS[:2]):
        mask_ST[row, : len(of_policy)] = torch.tensor(of_policy, dtype=torch.float)
    losses_ST = torch.arange(1.0, 16.0).reshape(3, ROOM)
    expected = {
        "token-mean": (losses_ST * mask_ST).sum() / mask_ST.sum(),
        "sequence-mean-token-mean": ((losses_ST * mask_ST).sum(1) / mask_ST.sum(1).clamp(min=1)).mean(),
        "fixed-length": (losses_ST * mask_ST).sum() / (3 * ROOM),
    }
    rows = to_batch(rewarded()).rows()
    tokens = sum(int(row.sequences[0].targets.sum()) for row in rows)
    sequence_K = torch.repeat_interleave(torch.arange(3), mask_ST.sum(1).long())
    weights_K = aggregation_weights(sequence_K, 3, aggregation)
    loss = (weights_K * losses_ST[mask_ST.bool()]).sum() / aggregation_normaliser(tokens, len(rows), aggregation, ROOM)
    assert float(loss) == pytest.approx(float(expected[aggregation]))


def test_trajectories_have_its_tokens_without_an_advantage(tmp_path: Path) -> None:
    rows = rewarded(prompt_ids=[1, 2])
    batch = to_batch(rows)
    add_advantages(batch, [1.0, 0.0, 2.0], AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    written = Trajectories(tmp_path / "steps", TrajectoriesConfig(), 1)
    written.write(0, rows, batch)
    written.settle()
    written.close()
    table = pq.read_table(tmp_path / "steps" / "step-000000.parquet")
    assert table.column("advantages").to_pylist() == [[0.0] * 3, [-1.0] * 5, [0.0] * 5]
    assert table.column("mask").to_pylist() == MASKS
    assert table.column("rollout_logps").to_pylist()[2] == [-3.0, -3.0, 0.0, -3.0, -3.0]


def test_rewards_of_its_reasoning_steps_count_in_the_group_alone() -> None:
    """Steps of 1, 0 and 2: mean 1, so 0 and -1 for those that are trained on."""
    by_step = [
        RewardValue(1.0, steps=((1, 1.0),)),
        RewardValue(0.0, steps=((4, 0.0),)),
        RewardValue(2.0, steps=((3, 2.0),)),
    ]
    rows = [replace(row, rewards={"steps": value}) for row, value in zip(rewarded(), by_step, strict=True)]
    configs: Any = RlConfig.model_validate(
        {"prompts": "p.jsonl", "rewards": [{"process_reward_model": "ours", "per_step": "sum"}]}
    ).rewards
    batch = to_batch(rows)
    steps = reasoning_step_rewards(rows, configs)
    add_advantages(batch, [1.0, 0.0, 2.0], AdvantageConfig(estimator="group"), KlConfig(), 0.0, steps)
    assert batch.numbers["advantages"].tolist() == [0.0, 0.0] + [-1.0] * 5


SMALL_LETTERS = "def small_letters(prompt, completion, label):\n    return sum(c.islower() for c in completion) / 100\n"


@pytest.mark.slow
def test_a_run_trains_on_complete_completions_alone(tmp_path: Path, tiny_model: Any, machines: Any) -> None:
    """An untrained model ends about a third of its completions of 100 tokens."""
    (tmp_path / "scores.py").write_text(SMALL_LETTERS)
    content = section_of(
        2,
        {"verifier": f"{tmp_path / 'scores.py'}:small_letters"},
        {"max_completion_length": 100},
        {"batch_size": 4},  # steps of the optimiser in which every completion may be truncated
        loss={"mask_truncated_completions": True},
        kl={"coefficient": 0.01},
    )
    outputs, result = run_rl(tmp_path, tiny_model(), content, machines, RESOURCES)
    rows = rows_of(outputs)
    truncated = [row for row in rows if row["finish_reason"] == "length"]
    assert 0 < len(truncated) < len(rows)
    assert all(not np.any(row["advantages"]) for row in truncated)
    assert any(np.any(row["advantages"]) for row in rows)
    assert np.isfinite(result.metrics["loss"])


@pytest.mark.slow
def test_a_step_of_truncated_completions_is_refused(tmp_path: Path, tiny_model: Any, machines: Any) -> None:
    (tmp_path / "scores.py").write_text(SMALL_LETTERS)
    content = section_of(
        2,
        {"verifier": f"{tmp_path / 'scores.py'}:small_letters"},
        {"max_completion_length": 1},
        loss={"mask_truncated_completions": True},
    )
    with pytest.raises(DataError, match=r"step 0: all 12 completions were truncated, so rl\.loss\.mask_truncated"):
        run_rl(tmp_path, tiny_model(), content, machines, RESOURCES)
