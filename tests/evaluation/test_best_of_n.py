"""The best of n: over all choices, as counted one by one."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.evaluation.best_of_n import chance_right


def test_the_best_of_two_by_hand() -> None:
    # pairs {3, 2}, {3, 1} and {2, 1}: the best are 3 (wrong), 3 and 2 (right)
    assert chance_right([3.0, 2.0, 1.0], [False, True, True], 2) == pytest.approx(1 / 3)
    assert chance_right([1.0, 1.0], [False, True], 2) == 0.5, "a tie is drawn lots for"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7), st.data())
def test_best_of_n_is_the_mean_over_all_choices(completions: list[tuple[int, bool]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(completions)))

    def of(choice: tuple[tuple[int, bool], ...]) -> float:
        best = max(reward for reward, _ in choice)
        return fmean(right for reward, right in choice if reward == best)

    rewards, right = [reward for reward, _ in completions], [right for _, right in completions]
    assert chance_right(rewards, right, n) == pytest.approx(fmean(map(of, combinations(completions, n))))


@pytest.mark.parametrize("n", [0, 3])
def test_n_is_between_1_and_the_number_of_completions(n: int) -> None:
    with pytest.raises(ValueError, match=f"the best of {n} among 2 completions"):
        chance_right([1.0, 2.0], [True, True], n)
