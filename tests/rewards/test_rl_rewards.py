"""The rewards of a step: weights, normalisation, length penalties, and uninformative prompts."""

from __future__ import annotations

import numpy as np
import pytest

from alignment_core.recipes.sections.rewards import CHOICE, RewardConfig
from alignment_core.recipes.sections.rl import AdvantageConfig, FilterConfig, KlConfig, ShapingConfig
from alignment_core.rewards.aggregation import (
    RunningMean,
    informative_groups,
    length_penalties,
    score_units,
    total_rewards,
)
from alignment_core.rewards.results import RewardValue
from alignment_core.rollout.advantages import ReasoningStepRewards, add_advantages, reasoning_step_rewards
from alignment_core.rollout.trajectories import numbers_by_token
from alignment_core.training.step_data import StepData
from tests.rollout.rollouts import rollout

GROUPS = np.array([0, 0, 1, 1])


def reward(**fields: object) -> RewardConfig:
    reward: RewardConfig = CHOICE.validate({"verifier": "task", **fields})
    return reward


def test_rewards_are_clipped_then_normalised_then_weighted_and_summed() -> None:
    raw = np.array([[1.0, 9.0], [0.0, 3.0], [1.0, 2.0], [1.0, 4.0]])
    # first: as it is, weight 2. second: clipped to at most 4 → 4, 3, 2, 4; deviations 1/2 and 1; by group:
    # ±0.5 / (0.5 + 1e-4) and ±1 / (1 + 1e-4), weight 0.5
    configs = [reward(weight=2.0), reward(clip=(0.0, 4.0), normalise="group", weight=0.5)]
    total = total_rewards(raw, GROUPS, configs, [RunningMean(), RunningMean()])
    half, whole = 0.5 * 0.5 / 0.5001, 0.5 * 1 / 1.0001
    assert total.tolist() == pytest.approx([2 + half, -half, 2 - whole, 2 + whole], rel=1e-12)


def test_equal_rewards_of_a_group_are_normalised_to_zero_without_division_by_zero() -> None:
    total = total_rewards(np.ones((4, 1)), GROUPS, [reward(normalise="group")], [RunningMean()])
    assert total.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("normalise", ["group", "batch", "running"])
def test_rewards_that_differ_by_rounding_alone_stay_almost_zero(normalise: str) -> None:
    # deviation of (0, 0, 0, 5e-7): 5e-7 √3 / 4 = 2.17e-7; the last one is (3/4) 5e-7 / (2.17e-7 + 1e-4) = 0.00374
    raw = np.array([[1.0], [1.0], [1.0], [1.0 + 5e-7]])
    total = total_rewards(raw, np.zeros(4, int), [reward(normalise=normalise)], [RunningMean()])
    assert total[-1] == pytest.approx(0.00374, abs=1e-5)
    assert total.sum() == pytest.approx(0, abs=1e-9)


def test_rewards_of_a_group_are_normalised_before_the_sum_as_in_trl() -> None:
    """``(r - mean) / (std + 1e-4)`` of TRL's `normalize_then_sum`, whose deviation has the divisor n - 1 where ours has n."""
    values = np.array([0.1, 0.4, 0.2, 0.9])
    total = total_rewards(values[:, None], np.zeros(4, int), [reward(normalise="group")], [RunningMean()])
    trls = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    ratio = (values.std(ddof=1) + 1e-4) / (values.std() + 1e-4)
    np.testing.assert_allclose(total, trls * ratio, rtol=1e-12)


def test_running_normalisation_covers_all_earlier_rewards_and_resumes_from_its_state() -> None:
    random = np.random.default_rng(0)
    parts = [random.normal(3.0, 2.0, (size, 1)) for size in (4, 7, 1, 20)]
    known = RunningMean()
    for part in parts:
        known = RunningMean(known.state)  # as after a kill
        total = total_rewards(part, np.zeros(len(part), int), [reward(normalise="running")], [known])
    everything = np.concatenate(parts)
    expected = (parts[-1][:, 0] - everything.mean()) / (everything.std() + 1e-4)
    np.testing.assert_allclose(total, expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 5.0]),
        ({"weight": 0.5}, [0.5, 2.5]),
        ({"normalise": "running", "weight": 2.0}, [-2.0, 2.0]),
        ({"normalise": "batch"}, [-1.0, 1.0]),
        ({"normalise": "model"}, [1.0, 5.0]),  # the source of the reward has normalised it
    ],
)
def test_a_critic_of_scores_begins_with_values_in_units_of_their_reward(
    fields: dict[str, object], expected: list[float]
) -> None:
    """Scores of 1 and 5: mean 3, deviation 2. A critic that is their model, and knew the end, would value each as its reward.
    OpenRLHF's `CriticModel` with `normalize_reward`: `values = (values - mean) / std`."""
    judge: RewardConfig = CHOICE.validate({"reward_model": "ours", **fields})
    scores, known = np.array([1.0, 5.0]), RunningMean()
    total = total_rewards(scores[:, None], np.zeros(2, int), [judge], [known])
    zero, one = score_units(judge, known)
    assert ((scores - zero) / one).tolist() == pytest.approx(expected)
    assert total.tolist() == pytest.approx(expected, rel=1e-4)


def test_a_critic_of_scores_has_the_mean_and_deviation_that_normalise_them() -> None:
    """Scores of 1 and 5 by a model with the mean 2 and the deviation 4 are rewards of -0.25 and 0.75."""
    judge: RewardConfig = CHOICE.validate({"reward_model": "ours", "normalise": "model", "weight": 2.0})
    zero, one = score_units(judge, RunningMean(), (2.0, 4.0))
    assert ((np.array([1.0, 5.0]) - zero) / one).tolist() == [2 * -0.25, 2 * 0.75]


def test_equal_scores_of_a_first_step_do_not_enlarge_a_critics_values() -> None:
    judge: RewardConfig = CHOICE.validate({"reward_model": "ours", "normalise": "running"})
    known = RunningMean()
    known.add(np.full(4, 3.0))
    assert score_units(judge, known) == (3.0, 1.0)


def test_the_length_penalty_grows_linearly_and_truncation_adds_a_penalty() -> None:
    lengths, cut = np.array([4, 6, 8, 10, 10]), np.array([False, False, False, False, True])
    config = ShapingConfig(overlong_buffer=4, overlong_penalty=1.0, truncation_penalty=0.5)
    assert length_penalties(lengths, cut, 10, config).tolist() == [0, 0, -0.5, -1.0, -1.5]
    assert length_penalties(lengths, cut, 10, ShapingConfig()).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("raw", "stays"),
    [
        ([0.0, 0.0], False),
        ([1.0, 1.0], False),
        ([0.5, 0.5], False),  # equal, with any mean
        ([1.0, 0.0], True),
        ([-7.5, -3.0], True),  # a reward model's scores know no bounds
        ([4.0, 9.0], True),
        ([3.3, 3.3], False),
        ([0.1 + 0.2, 0.3], False),  # which differ in the last bit
        ([8.0, 8.0 + 5e-7], False),  # as a reward model's scores of one answer in two batches
        ([0.5, 0.501], True),
        ([0.7], False),  # the others have no reward
    ],
)
def test_a_group_is_informative_if_its_rewards_differ(raw: list[float], stays: bool) -> None:
    column = np.array([*raw, 0.0, 1.0])[:, None]
    groups = np.array([7] * len(raw) + [8, 8])
    assert informative_groups(column, groups, [reward()], FilterConfig()) == ({7, 8} if stays else {8})


def test_rewards_of_a_prompt_are_compared_clipped_weighted_and_added_up() -> None:
    raw = np.array([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]])
    groups = np.array([7, 7, 8, 8, 9, 9])
    sources = [reward(clip=(0.0, 2.0)), reward(weight=0.5)]  # 2 and 2, 1 and 1, 1 and 0.5
    assert informative_groups(raw, groups, sources, FilterConfig()) == {9}


def test_bounds_of_the_filter_leave_out_prompts_that_are_too_hard_or_too_easy() -> None:
    raw = np.array([[1.0], [0.8], [1.0], [0.0], [0.2], [0.0]])
    groups = np.array([7, 7, 8, 8, 9, 9])
    assert informative_groups(raw, groups, [reward()], FilterConfig(low=0.1)) == {7, 8}
    assert informative_groups(raw, groups, [reward()], FilterConfig(low=0.1, high=0.9)) == {8}
    assert informative_groups(raw, groups, [reward(weight=0.5)], FilterConfig(high=0.3)) == {8, 9}


def sampled() -> StepData:
    """Two prompts, two completions each; the third token of the first completion is not trained."""
    trained = [[True, True, False], [True, True], [True], [True, True]]
    return StepData.of([[1]] * 4, [[2] * len(mask) for mask in trained], trained, [0, 0, 1, 1])


REWARDS = [1.0, 0.0, 2.0, 4.0]


def each(data: StepData, name: str) -> list[list[float]]:
    """A column's numbers, completion by completion, as they are stored."""
    masks = [targets[1:] for targets in np.split(data.targets_N, data.ends_S[:-1])]
    return [numbers.tolist() for numbers in numbers_by_token(masks, data.numbers)[name]]


def test_a_group_baseline_reaches_every_trained_token() -> None:
    data = sampled()
    add_advantages(data, REWARDS, AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    assert each(data, "advantages") == [[0.5, 0.5, 0.0], [-0.5, -0.5], [-1.0], [1.0, 1.0]]


def test_the_kl_of_a_token_lowers_the_return_of_that_and_earlier_tokens() -> None:
    data = sampled()
    data.numbers.update(old_logps=np.zeros(7, np.float32), reference_logps=np.zeros(7, np.float32))
    data.numbers["reference_logps"][1] = -1.0  # k1 = 0 - -1 = 1 at the second token
    config = KlConfig(coefficient=0.5, place="reward", estimator="k1")
    metrics = add_advantages(data, REWARDS, AdvantageConfig(estimator="returns"), config, 0.5)
    advantages = each(data, "advantages")
    assert (advantages[0], advantages[3]) == ([0.5, 0.5, 0.0], [4.0, 4.0])
    assert metrics["kl"] == pytest.approx(1 / 7), "of seven trained tokens"


def test_gae_uses_values_and_gives_the_critics_targets() -> None:
    data = sampled()
    data.numbers["old_values"] = np.full(7, 0.5, np.float32)
    config = AdvantageConfig(estimator="gae", gamma=1.0, gae_lambda=1.0)
    add_advantages(data, REWARDS, config, KlConfig(), 0.0)
    assert each(data, "advantages")[3] == [3.5, 3.5]
    returns = each(data, "returns")
    assert (returns[3], returns[0]) == ([4.0, 4.0], [1.0, 1.0, 0.0])


def test_an_epoch_takes_each_completion_once_and_those_of_a_prompt_together() -> None:
    data = StepData.of([[1]] * 6, [[2]] * 6, [[True]] * 6, [7, 9, 7, 4, 9, 7])
    orders = [data.order(0, epoch) for epoch in range(8)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert {tuple(order.index(row) - order.index(0) for row in (2, 5)) for order in orders} == {(1, 2)}
    assert len({tuple(order) for order in orders}) > 2
    assert orders == [data.order(0, epoch) for epoch in range(8)]


def stepwise() -> tuple[StepData, ReasoningStepRewards | None]:
    """Three completions of two prompts, of which the first has two steps, and the others one each; with the weight 0.5."""
    data = StepData.of([[1]] * 3, [[2, 2, 2], [3, 3], [4]], [[True] * 3, [True] * 2, [True]], [0, 0, 1])
    by_step = [
        RewardValue(0.5, steps=((0, 0.5), (2, 2.0))),
        RewardValue(0.5, steps=((1, 0.5),)),
        RewardValue(1.0, steps=((0, 1.0),)),
    ]
    rollouts = [
        rollout([True] * tokens, rewards={"steps": rewards_of, "other": 7.0})
        for tokens, rewards_of in zip((3, 2, 1), by_step, strict=True)
    ]
    config = CHOICE.validate({"process_reward_model": "ours", "per_step": "sum", "weight": 0.5})
    return data, reasoning_step_rewards(rollouts, [config, reward()])


def test_rewards_of_steps_are_those_of_their_own_tokens() -> None:
    data, steps = stepwise()
    metrics = add_advantages(data, [1.25, 0.25, 0.5], AdvantageConfig(estimator="returns"), KlConfig(), 0.0, steps)
    # the first completion has 1.0 of another reward at its end, beside its second step
    assert each(data, "advantages") == [[2.25, 2.0, 2.0], [0.25, 0.25], [0.5]]
    assert metrics["reward"] == pytest.approx(2 / 3), "as if each answer had one number"


def test_rewards_are_scaled_by_the_deviation_of_the_group_or_of_the_batch() -> None:
    """Groups (0, 2) and (4, 4): means 1 and 4. Deviations with n - 1: √2 and 0; of all four, mean 2.5, √(11/3)."""
    data = StepData.of([[0]] * 4, [[1]] * 4, [[True]] * 4, [0, 0, 1, 1])
    for scale, deviation in (("none", 1.0), ("group", 2**0.5 + 1e-4), ("batch", (11 / 3) ** 0.5 + 1e-4)):
        config = AdvantageConfig.model_validate({"estimator": "group", "scale_rewards": scale})
        add_advantages(data, [0.0, 2.0, 4.0, 4.0], config, KlConfig(), 0.0)
        assert data.numbers["advantages"].tolist() == pytest.approx([-1 / deviation, 1 / deviation, 0.0, 0.0])


def test_the_baseline_of_steps_is_that_of_all_steps_of_the_group() -> None:
    """DeepSeekMath's process supervision: steps 0.25, 1 and 0.25 have the mean 0.5, and the deviation √(0.375/2)."""
    data, steps = stepwise()
    add_advantages(data, [0.25, 0.25, 0.5], AdvantageConfig(estimator="group"), KlConfig(), 0.0, steps)
    assert each(data, "advantages") == [[0.25, 0.5, 0.5], [-0.25, -0.25], [0.0]]
    data, steps = stepwise()
    config = AdvantageConfig(estimator="group", scale_rewards="group")
    add_advantages(data, [0.25, 0.25, 0.5], config, KlConfig(), 0.0, steps)
    deviation = 0.1875**0.5 + 1e-4
    assert each(data, "advantages")[0] == pytest.approx([0.25 / deviation, 0.5 / deviation, 0.5 / deviation])


def test_a_completion_without_trained_tokens_does_not_change_the_others() -> None:
    data = StepData.of([[1]] * 3, [[2, 2], [3], [4]], [[True, True], [False], [True]])
    add_advantages(data, [1.0, 5.0, 2.0], AdvantageConfig(estimator="returns"), KlConfig(), 0.0)
    assert data.numbers["advantages"].tolist() == [1.0, 1.0, 2.0]
    assert [values.tolist() for values in (data.lengths_S, data.places_K(data.rows()[1:]))] == [[2, 0, 1], [2]]
