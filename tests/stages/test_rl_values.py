"""In which units a critic learns."""

from __future__ import annotations

import json

import numpy as np

from alignment_core.rollout.advantages import ValueScale

RETURNS = [np.array([100.0, 104.0], np.float32), np.array([96.0, 100.0, 100.0], np.float32)]


def test_a_critic_learns_returns_in_units_of_all_so_far() -> None:
    scale = ValueScale(normalise=True)
    np.testing.assert_array_equal(scale.values_of(np.ones(2, np.float32)), [1, 1])  # it has learnt nothing yet
    np.testing.assert_allclose(scale.targets_of(RETURNS[0]), [-1, 1])
    np.testing.assert_allclose(scale.values_of(np.array([-1.0, 0.0, 2.0])), [100, 102, 106])
    scale = going_on(scale)
    seen = np.concatenate(RETURNS)
    np.testing.assert_allclose(scale.targets_of(RETURNS[1]), (RETURNS[1] - seen.mean()) / seen.std(), rtol=1e-5)
    np.testing.assert_allclose(scale.values_of(np.zeros(1)), [seen.mean()])


def going_on(scale: ValueScale) -> ValueScale:
    """As of a run that was killed."""
    other = ValueScale(normalise=True)
    other.restore(json.loads(json.dumps(scale.state)))
    return other


def test_outputs_of_a_critic_that_is_an_exact_reward_model_stay_its_values() -> None:
    """It knows all returns, 3, 2 and 1, so there is nothing to learn: it is standardised as they are in the loss (of 3, 2, 1
    by hand 1.22, 0, -1.22), and its unchanged outputs are its values after each step."""
    scale = ValueScale(normalise=True, outputs_values=True)
    exact = np.array([3.0, 2.0, 1.0], np.float32)
    for returns in (exact, exact[:1]):
        targets = scale.targets_of(returns)
        mean, deviation = scale.of_loss
        np.testing.assert_allclose((returns - mean) / deviation, targets, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(scale.values_of(exact), exact)
        if returns is exact:
            np.testing.assert_allclose(targets, [1.2247, 0, -1.2247], atol=1e-4)
    assert ValueScale(normalise=False, outputs_values=True).of_loss == (0.0, 1.0)


def test_without_normalisation_returns_are_values() -> None:
    scale = ValueScale(normalise=False)
    assert scale.targets_of(RETURNS[0]) is RETURNS[0]
    assert scale.values_of(RETURNS[0]) is RETURNS[0]
