"""Which completions of a prompt are kept, worked out by hand."""

from __future__ import annotations

import math

import pytest

from alignment_core.errors import NumericError
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.rollout.best import lowest_kept, select_best

SCORES = [0.2, 0.9, 0.5, 0.9]  # the best are completions 1 and 3, then 2, 0
ANY = -math.inf


def test_the_best_are_kept_and_the_earlier_wins_ties():
    assert select_best(SCORES, "abcd", ANY, 1) == ([1], {"not_best": 3})
    assert select_best(SCORES, "abcd", ANY, 3) == ([1, 3, 2], {"not_best": 1})
    assert select_best(SCORES, "abcd", ANY, 9) == ([1, 3, 2, 0], {})


def test_a_completion_is_kept_once_and_makes_no_other_lose_its_place():
    # 3 equals 1, so that the second best of different ones is 2
    assert select_best(SCORES, "abcb", ANY, 2) == ([1, 2], {"duplicate": 1, "not_best": 1})


def test_scores_at_or_above_the_threshold_are_kept():
    assert select_best(SCORES, "abcd", 0.5, None) == ([1, 3, 2], {"low_score": 1})
    assert select_best(SCORES, "abcd", 0.91, None) == ([], {"low_score": 4})
    assert select_best(SCORES, "aaaa", 0.5, None) == ([1], {"duplicate": 2, "low_score": 1})


@pytest.mark.parametrize(
    ("fields", "lowest"),
    [
        ({}, ANY),
        ({"min_score": 0.3}, 0.3),
        ({"strategy": "threshold", "threshold": 0.7}, 0.7),
        ({"strategy": "threshold", "threshold": 0.7, "min_score": 0.8}, 0.8),
        ({"strategy": "threshold", "quantile": 0.5}, 0.7),  # of 0.2, 0.5, 0.9, 0.9: half-way between 0.5 and 0.9
        ({"strategy": "threshold", "quantile": 0.75}, 0.9),
    ],
)
def test_the_lowest_score_that_is_kept(fields, lowest):
    assert lowest_kept(SCORES, BestConfig(**fields)) == pytest.approx(lowest)


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(NumericError, match="1 of 2 scores are not finite"):
        lowest_kept([0.5, math.nan], BestConfig())
