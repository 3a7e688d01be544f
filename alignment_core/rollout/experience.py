"""From rewarded completions to advantages: what one step of reinforcement learning does between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Samples = list[dict[str, Any]]
"""Rows of one step: those of a rollout, with ``mask`` [T], ``reward``, and the columns of :func:`step_schema`."""


def step_schema() -> pa.Schema:
    """One row per completion of a step; lists are as long as the completion, and null where nobody asked for them.

    ``versions`` says after how many steps the policy was that sampled each token,
    ``group`` is the prompt's index among all that the run has drawn, ``used`` whether it was trained on, ``rewards`` what
    each source gave, and ``reward`` what came of it, null where the completion was not used. Where a source gave none,
    ``rewards`` holds null and ``failures`` the reason; ``failures`` is null where all did.
    """
    import pyarrow as pa

    from alignment_core.rollout.records import rollout_schema

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


def put_advantages(samples: Samples, config: AdvantageConfig, kl: KlConfig, coefficient: float) -> dict[str, float]:
    """Work out ``advantages`` (and ``returns`` for a critic) of all samples, and write them into the rows; metrics.

    The reward is that of the last trained token. With the KL in the reward each token loses ``coefficient`` times its
    estimate. Baselines look at the rewards alone, so that a group's KL stays with the tokens that caused it.
    """
    import torch

    from alignment_core.losses import advantages as estimators
    from alignment_core.losses.kl import kl_estimate

    lengths = [int(np.sum(row["mask"])) for row in samples]
    sequence_K = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    last_S = torch.cumsum(torch.tensor(lengths), 0) - 1
    reward_S = torch.tensor([row["reward"] for row in samples], dtype=torch.float64)
    group_S = torch.unique(torch.tensor([row["group"] for row in samples]), return_inverse=True)[1]

    credit_S = reward_S
    if config.estimator in ("group", "leave-one-out", "batch"):
        credit_S = estimators.baselined(reward_S, group_S, config.estimator)
    if config.divide_by_deviation:
        credit_S = credit_S / (estimators.group_deviation(reward_S, group_S) + 1e-4)
    rewards_K = torch.zeros(len(sequence_K), dtype=torch.float64)
    rewards_K[last_S] = credit_S
    metrics = {"reward": float(reward_S.mean()), "reward_deviation": float(reward_S.std(correction=0))}
    if kl.place == "reward" and coefficient > 0:
        kl_K = kl_estimate(_trained(samples, "old_logps"), _trained(samples, "reference_logps"), kl.estimator)
        rewards_K = rewards_K - coefficient * kl_K
        metrics["kl"] = float(kl_K.mean())
    if config.estimator == "gae":
        values_K = _trained(samples, "old_values")
        advantages_K = estimators.generalised_advantages(
            rewards_K, values_K, sequence_K, config.gamma, config.gae_lambda
        )
        _put(samples, "returns", advantages_K + values_K, lengths)
    else:
        advantages_K = estimators.discounted_returns(rewards_K, sequence_K, config.gamma)
    if config.whiten != "none":
        advantages_K = estimators.whitened(advantages_K, config.whiten == "mean-and-deviation")
    _put(samples, "advantages", advantages_K, lengths)
    return metrics


def put_numbers(samples: Samples, name: str, values: Sequence[tuple[int, np.ndarray]]) -> None:
    """Write (row number, values of its trained tokens) into the rows, zero at the other tokens."""
    for number, one in values:
        mask = np.asarray(samples[number]["mask"], bool)
        full = np.zeros(len(mask), np.float32)
        full[mask] = one
        samples[number][name] = full


def _trained(samples: Samples, name: str) -> Tensor:
    """A column's values at all trained tokens, one row after the other. [K] float64"""
    import torch

    parts = [np.asarray(row[name], np.float64)[np.asarray(row["mask"], bool)] for row in samples]
    return torch.from_numpy(np.concatenate(parts))


def _put(samples: Samples, name: str, values_K: Tensor, lengths: Sequence[int]) -> None:
    put_numbers(samples, name, list(enumerate(np.split(values_K.numpy(), np.cumsum(lengths)[:-1]))))
