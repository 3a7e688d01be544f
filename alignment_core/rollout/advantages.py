"""From rewarded completions to advantages: what one step of reinforcement learning does between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.columns import parts
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig
from alignment_core.training.step_data import StepData

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Samples = list[dict[str, Any]]
"""Rows of one step: those of a rollout, with ``mask`` [T], ``reward``, and the columns of :func:`step_schema`. What has a
value for each token is an array."""


def step_schema() -> pa.Schema:
    """One row per completion of a step; lists are as long as the completion, and null where nobody asked for them.

    ``versions`` says after how many steps the policy was that sampled each token,
    ``group`` is the prompt's index among all that the run has drawn, ``used`` whether it was trained on, ``rewards`` what
    each source gave, and ``reward`` what came of it, null where the completion was not used. Where a source gave none,
    ``rewards`` holds null and ``failures`` the reason; ``failures`` is null where all did.
    """
    import pyarrow as pa

    from alignment_core.rollout.schemas import rollout_schema

    numbers = pa.list_(pa.float32())
    schema = rollout_schema()
    schema = schema.set(schema.get_field_index("logps"), pa.field("rollout_logps", numbers))
    for name, kind in (
        ("group", pa.int32()),
        ("used", pa.bool_()),
        ("rewards", numbers),
        ("failures", pa.list_(pa.string())),
        ("mask", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),
        ("reward", pa.float32()),
        ("old_logps", numbers),
        ("reference_logps", numbers),
        ("old_values", numbers),
        ("advantages", numbers),
        ("returns", numbers),
    ):
        schema = schema.append(pa.field(name, kind))
    return schema


def step_data(samples: Samples) -> StepData:
    """The columns of the samples that are trained on."""
    columns = ([row[name] for row in samples] for name in ("prompt_ids", "completion_ids", "mask", "group"))
    data = StepData.of(*columns)
    logps = np.concatenate([np.asarray(row["rollout_logps"], np.float32) for row in samples])
    data.numbers["rollout_logps"] = logps[np.concatenate([row["mask"] for row in samples])]
    return data


@dataclass(frozen=True)
class StepRewards:
    """Rewards of the steps of completions, U of them, each at a trained token."""

    place_U: np.ndarray
    """Which of the trained tokens of all completions."""
    reward_U: np.ndarray
    sequence_U: np.ndarray
    counted_S: np.ndarray
    """What stands for them in the rewards of the completions."""


def step_rewards(samples: Samples) -> StepRewards:
    """The rewards of the steps of the samples that are trained on; each of them is a completion of one turn."""
    starts_S = np.cumsum([0, *(int(row["mask"].sum()) for row in samples)])
    found = [
        (starts_S[number] + place, reward, number)
        for number, row in enumerate(samples)
        for place, reward in row["steps"]
    ]
    place_U, reward_U = np.array([one[0] for one in found], int), np.array([one[1] for one in found], float)
    sequence_U = np.array([one[2] for one in found], int)
    return StepRewards(place_U, reward_U, sequence_U, np.array([row["in_steps"] for row in samples], float))


def add_advantages(
    data: StepData,
    rewards: Sequence[float],
    config: AdvantageConfig,
    kl: KlConfig,
    coefficient: float,
    steps: StepRewards | None = None,
) -> dict[str, float]:
    """Work out ``advantages`` (and ``returns`` for a critic) of all trained tokens, and add them to the data; metrics.

    The reward is that of the last trained token. With the KL in the reward each token loses ``coefficient`` times its
    estimate. Baselines look at the rewards alone, so that a group's KL stays with the tokens that caused it. Rewards of
    ``steps`` are those of their own tokens; their baseline and deviation are of all steps of a group, as in DeepSeekMath's
    process supervision (Shao et al. 2024). Args: the reward of each completion.
    """
    import torch

    from alignment_core.losses import advantages as estimators
    from alignment_core.losses.kl import kl_estimate

    def numbers(name: str) -> Tensor:
        return torch.from_numpy(data.numbers[name].astype(np.float64))

    lengths_S = torch.from_numpy(data.lengths_S)
    reward_S = torch.tensor(rewards, dtype=torch.float64)
    group_S = torch.unique(torch.from_numpy(data.groups_S), return_inverse=True)[1]

    def credit(reward_N: Tensor, group_N: Tensor) -> Tensor:
        credit_N = reward_N
        if config.estimator in ("group", "leave-one-out", "batch"):
            credit_N = estimators.baselined(reward_N, group_N, config.estimator)
        if config.divide_by_deviation:
            credit_N = credit_N / (estimators.group_deviation(reward_N, group_N) + 1e-4)
        return credit_N

    credit_S = credit(reward_S if steps is None else reward_S - torch.from_numpy(steps.counted_S), group_S)
    rewards_K = torch.zeros(int(lengths_S.sum()), dtype=torch.float64)
    said_S = lengths_S > 0
    rewards_K[torch.cumsum(lengths_S, 0)[said_S] - 1] = credit_S[said_S]
    if steps is not None:
        credit_U = credit(torch.from_numpy(steps.reward_U), group_S[torch.from_numpy(steps.sequence_U)])
        rewards_K.index_add_(0, torch.from_numpy(steps.place_U), credit_U)
    metrics = {"reward": float(reward_S.mean()), "reward_deviation": float(reward_S.std(correction=0))}
    if kl.place == "reward" and coefficient > 0:
        kl_K = kl_estimate(numbers("old_logps"), numbers("reference_logps"), kl.estimator)
        metrics["kl"] = float(kl_K.mean())
        rewards_K -= kl_K.mul_(coefficient)
    if config.estimator == "gae":
        values_K = numbers("old_values")
        advantages_K = estimators.generalised_advantages(
            rewards_K, values_K, lengths_S, config.gamma, config.gae_lambda
        )
        data.numbers["returns"] = values_K.add_(advantages_K).float().numpy()
    else:
        advantages_K = estimators.discounted_returns(rewards_K, lengths_S, config.gamma)
    if config.whiten != "none":
        advantages_K = estimators.whitened(advantages_K, config.whiten == "mean-and-deviation")
    data.numbers["advantages"] = advantages_K.float().numpy()
    return metrics


def put_numbers(samples: Samples, data: StepData) -> None:
    """Write the numbers of all trained tokens into the rows, zero at the other tokens of a completion."""
    mask_T = np.concatenate([row["mask"] for row in samples])
    ends_S = np.cumsum([len(row["mask"]) for row in samples])
    for name, values_K in data.numbers.items():
        values_T = np.zeros(len(mask_T), np.float32)
        values_T[mask_T] = values_K
        for row, values in zip(samples, parts(values_T, ends_S), strict=True):
            row[name] = values
