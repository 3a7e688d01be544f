"""Pair selection: which completions of one prompt become chosen and rejected, worked out by hand."""

from __future__ import annotations

import random

import pytest

from alignment_core.errors import NumericError
from alignment_core.recipes import SelectionConfig
from alignment_core.rollout.selection import select_pairs

SCORES = [0.2, 0.9, 0.5, 0.0]  # best is completion 1, then 2, 0, 3
DIFFERENT = [(0,), (1,), (2,), (3,)]


def select(scores, completions=None, seed=0, **config):
    completions = completions or [(number,) for number in range(len(scores))]
    return select_pairs(scores, completions, SelectionConfig(**config), random.Random(seed))


def test_best_worst_pairs_the_highest_score_with_the_lowest():
    assert select(SCORES) == ([(1, 3)], None)


def test_best_random_pairs_the_best_with_any_other():
    pairs = [select(SCORES, strategy="best_random", seed=seed)[0] for seed in range(40)]
    assert {chosen for ((chosen, _),) in pairs} == {1}
    assert {rejected for ((_, rejected),) in pairs} == {0, 2, 3}


def test_random_pair_takes_any_two_and_the_higher_score_is_chosen():
    pairs = {pair for seed in range(200) for pair in select(SCORES, strategy="random_pair", seed=seed)[0]}
    assert pairs == {(1, 2), (1, 0), (1, 3), (2, 0), (2, 3), (0, 3)}


@pytest.mark.parametrize("strategy", ["best_random", "random_pair"])
def test_the_same_generator_gives_the_same_pair(strategy):
    assert select(SCORES, strategy=strategy, seed=7) == select(SCORES, strategy=strategy, seed=7)


def test_all_pairs_keeps_the_widest_margins():
    # margins: 1-3 0.9, 1-0 0.7, 2-3 0.5, 1-2 0.4, 2-0 0.3, 0-3 0.2
    widest = [(1, 3), (1, 0), (2, 3), (1, 2), (2, 0), (0, 3)]
    for limit in (1, 3, 6, 9):
        assert select(SCORES, strategy="all_pairs", max_pairs_per_prompt=limit) == (widest[:limit], None)


def test_max_pairs_is_for_all_pairs_alone():
    assert len(select(SCORES)[0]) == len(select(SCORES, max_pairs_per_prompt=5)[0]) == 1


def test_equal_scores_are_never_a_pair():
    for strategy in ("best_worst", "best_random", "random_pair", "all_pairs"):
        assert select([0.5, 0.5, 0.5], strategy=strategy) == ([], "tie")


def test_scores_that_are_equal_up_to_rounding_are_a_tie():
    """Three rewards of 0.1 are 0.30000000000000004, and the same text scored in another batch differs in its last digits."""
    assert select([0.1 + 0.1 + 0.1, 0.3]) == ([], "tie")
    assert select([123.456789, 123.45679]) == ([], "tie")
    assert select([0.30001, 0.3]) == ([(0, 1)], None)


def test_among_equals_the_earlier_completion_is_best_and_the_later_one_worst():
    assert select([1.0, 0.0, 1.0, 0.0]) == ([(0, 3)], None)


def test_a_margin_is_reached_at_exactly_its_value():
    assert select([0.5, 0.0], min_margin=0.5) == ([(0, 1)], None)
    assert select([0.5, 0.0], min_margin=0.51) == ([], "margin")


def test_all_pairs_keeps_only_pairs_beyond_the_margin():
    pairs, reason = select(SCORES, strategy="all_pairs", min_margin=0.5, max_pairs_per_prompt=9)
    assert (pairs, reason) == ([(1, 3), (1, 0), (2, 3)], None)


def test_the_reason_is_that_of_the_widest_pair():
    # 0-1 and 0-2 are 0.1 apart, 1-2 is a tie: the prompt was lost to the margin
    assert select([0.6, 0.5, 0.5], strategy="all_pairs", min_margin=0.2) == ([], "margin")


def test_identical_completions_are_never_a_pair():
    assert select([1.0, 0.0], [(1, 2), (1, 2)]) == ([], "identical")


def test_all_pairs_skips_identical_completions_and_keeps_the_others():
    pairs, _ = select([1.0, 0.0, 0.4], [(1,), (1,), (2,)], strategy="all_pairs", max_pairs_per_prompt=9)
    assert pairs == [(0, 2), (2, 1)]


def test_all_pairs_gives_a_pair_of_equal_completions_once_and_spends_its_limit_on_different_pairs():
    # a 1.0, a 1.0, b 0.5, c 0.0, c 0.0: a-c is 1.0 apart, a-b 0.5, b-c 0.5; each could come from two completions or four
    scores, completions = [1.0, 1.0, 0.5, 0.0, 0.0], ["a", "a", "b", "c", "c"]
    pairs, _ = select(scores, completions, strategy="all_pairs", max_pairs_per_prompt=9)
    assert pairs == [(0, 4), (0, 2), (2, 4)]
    assert select(scores, completions, strategy="all_pairs", max_pairs_per_prompt=3)[0] == pairs


def test_best_worst_takes_the_widest_pair_that_differs_where_both_ends_are_equal():
    assert select([1.0, 0.7, 0.4, 0.0], ["a", "b", "c", "a"]) == ([(1, 3)], None)  # 0.7 apart; a-c is 0.6
    assert select([1.0, 0.7, 0.1, 0.0], ["a", "b", "c", "a"]) == ([(0, 2)], None)  # 0.9 apart; b-a is 0.7


@pytest.mark.parametrize("strategy", ["best_random", "random_pair"])
def test_a_random_completion_differs_from_the_chosen(strategy):
    scores, completions = [1.0, 0.9, 0.8, 0.7, 0.0], ["a", "a", "a", "a", "b"]
    for seed in range(20):
        ((chosen, rejected),), reason = select(scores, completions, strategy=strategy, seed=seed)
        assert (completions[chosen], completions[rejected], reason) == ("a", "b", None)


@pytest.mark.parametrize("strategy", ["best_worst", "best_random", "random_pair", "all_pairs"])
def test_one_completion_alone_gives_no_pair(strategy):
    assert select([1.0], strategy=strategy) == ([], "identical")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error_and_no_pair(broken):
    with pytest.raises(NumericError, match="not all finite"):
        select([1.0, broken, 0.0])
