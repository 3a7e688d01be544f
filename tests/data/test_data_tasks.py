"""Built-in tasks: verifiable, split without overlap, reproducible, and wrong exactly where they should be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.data import kinds, tasks
from alignment_core.errors import UserError

WITH_ANSWERS = [name for name in tasks.names() if name not in tasks.VERIFIERS]
NAMES = pytest.mark.parametrize("task", WITH_ANSWERS)


def rows_of_task(
    task: str, kind: str, split: str = "train", count: int = 200, seed: int = 0, **options: Any
) -> list[Any]:
    return [kinds.load(kind).of_problem(problem) for problem in tasks.problems(task, split, count, seed, options)]


@NAMES
def test_labels_verify_and_other_answers_do_not(task: str) -> None:
    for row in rows_of_task(task, "prompts"):
        assert tasks.verify(task, row["prompt"], f" {row['label']}\n", row["label"]) == 1.0
        assert tasks.verify(task, row["prompt"], row["label"] + "x", row["label"]) == 0.0


@pytest.mark.parametrize(
    ("task", "solve"),
    [
        ("reverse", lambda words: words[0][::-1]),
        ("sort", lambda words: "".join(sorted(words[0]))),
        ("first", lambda words: words[0][0] * 4),
        ("last", lambda words: words[0][-1] * 4),
        ("max", lambda words: str(max(map(int, words)))),
    ],
)
def test_answers_of_built_in_tasks_are_right(task: str, solve: Any) -> None:
    for row in rows_of_task(task, "demonstrations"):
        assert row["completion"] == solve(row["prompt"].split(":")[1].split())


@pytest.mark.parametrize("task", tasks.names())
def test_no_prompt_is_in_both_splits_for_any_seed(task: str) -> None:
    train = {row["prompt"] for seed in (1, 2) for row in rows_of_task(task, "prompts", "train", 500, seed)}
    test = {row["prompt"] for seed in (1, 2) for row in rows_of_task(task, "prompts", "test", 100, seed)}
    assert not train & test


@NAMES
def test_same_seed_same_rows_and_more_rows_begin_with_fewer(task: str) -> None:
    assert rows_of_task(task, "preferences", count=50) == rows_of_task(task, "preferences", count=80)[:50]
    assert rows_of_task(task, "preferences", count=50) != rows_of_task(task, "preferences", count=50, seed=1)


def test_rejected_answers_are_wrong_and_not_empty() -> None:
    for row in rows_of_task("mixed", "preferences", count=1000):
        assert row["rejected"] not in ("", row["chosen"])


def test_share_of_correct_demonstrations_is_as_configured() -> None:
    gold = {row["prompt"]: row["chosen"] for row in rows_of_task("reverse", "preferences", count=1000)}
    right = sum(
        gold[row["prompt"]] == row["completion"]
        for row in rows_of_task("reverse", "demonstrations", count=1000, correct=0.3)
    )
    assert 240 <= right <= 360  # 300 expected, standard deviation 14


def test_prompts_of_the_mixture_name_their_task() -> None:
    assert {row["task"] for row in rows_of_task("mixed", "prompts")} == set(tasks.MIXTURE)


@given(st.integers(0, 2**31 - 1), st.sampled_from(WITH_ANSWERS))
def test_every_seed_makes_texts_that_are_printable_ascii(seed: int, task: str) -> None:
    for row in rows_of_task(task, "preferences", count=3, seed=seed):
        assert all(value.isascii() and value.strip() for value in row.values())


def test_prompt_without_a_label_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="without a label"):
        tasks.verify("reverse", "reverse: abc", "cba", None)


@pytest.mark.parametrize(
    ("task", "split", "options", "sentence"),
    [
        ("revers", "train", {}, "no built-in task 'revers'; did you mean 'reverse'"),
        ("reverse", "tests", {}, "no split 'tests'; did you mean 'test'"),
        ("reverse", "train", {"corect": 1}, "no option 'corect'; did you mean 'correct'"),
        ("reverse", "train", {"correct": 2}, "share of correct demonstrations, between 0 and 1, got 2"),
        ("reverse", "train", {"correct": "half"}, "got 'half'"),
    ],
)
def test_unknown_task_split_or_option_is_answered_with_the_nearest(
    task: str, split: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        tasks.check(task, split, options)
