"""The pairing of prompts and completions for a baseline of mismatched pairs."""

from __future__ import annotations

import pytest

from alignment_core.errors import DataError
from alignment_core.training.kto_mismatch import mismatched, partners


def test_with_distinct_prompts_each_takes_the_completion_of_the_next_row() -> None:
    assert partners([[1], [2], [3]]) == [1, 2, 0]


def test_no_completion_is_paired_with_its_own_prompt_and_each_is_used_once() -> None:
    prompts = [[letter] for letter in b"abacabdbcaed"]  # a four times, b three times, c and d twice, e once
    chosen = partners(prompts)
    assert sorted(chosen) == list(range(len(prompts)))
    assert all(prompts[row] != prompts[partner] for row, partner in enumerate(chosen))
    assert chosen == partners(prompts), "it follows from the rows alone"


def test_completions_are_reused_for_a_prompt_of_more_than_half_of_the_rows() -> None:
    prompts = [[1], [1], [1], [2], [1], [3]]
    chosen = partners(prompts)
    assert all(prompts[row] != prompts[partner] for row, partner in enumerate(chosen))
    assert {chosen[row] for row in (0, 1, 2, 4)} == {3, 5}, "of both other rows"


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_with_a_single_prompt_are_refused_with_the_fix(rows: int) -> None:
    with pytest.raises(
        DataError, match=rf"all {rows} train rows have the same prompt.*add rows with other prompts, or"
    ):
        partners([[1, 2]] * rows)
    with pytest.raises(DataError, match=rf"all {rows} test rows .*hold out more rows \(`test_rows`\)"):
        partners([[1, 2]] * rows, "test")


def test_the_same_question_about_other_images_is_another_prompt() -> None:
    """Three rows about one image and three about another: each of them is paired with a completion about the other."""
    prompts, images = [[1, 2]] * 6, [("red",)] * 3 + [("blue",)] * 3
    assert partners(prompts, images=images) == [3, 4, 5, 0, 1, 2]
    with pytest.raises(DataError, match="have the same prompt"):
        partners(prompts, images=[("red",)] * 6)


def test_a_mismatched_pair_is_never_longer_than_the_longest_row() -> None:
    prompts, completions = [[1] * 6, [2]], [[3, 4], [5, 6, 7, 8]]  # rows of 8 and 5 tokens
    assert mismatched(prompts, completions) == [[5, 6], [3, 4]]
