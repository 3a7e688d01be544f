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


def test_without_normalisation_returns_are_values() -> None:
    scale = ValueScale(normalise=False)
    assert scale.targets_of(RETURNS[0]) is RETURNS[0]
    assert scale.values_of(RETURNS[0]) is RETURNS[0]
