"""The account of missing rewards."""

from __future__ import annotations

import json

import pytest

from alignment_core.errors import DataError
from alignment_core.rewards.results import Account, Answers, allowed_failures, failure_of, numbers


def test_the_share_of_failures_is_of_a_steps_rows_even_in_several_parts() -> None:
    account = Account("the judge", max_failed=0.25, field="f", window=8)
    rows = [{"source": f"rows:{number}", "prompt_text": "?"} for number in range(4)]

    def answers(failed: int) -> Answers:
        yield from ((number, None if number < failed else 1.0) for number in range(4))

    assert numbers(account.settle(rows, answers(2))) == [None, None, 1.0, 1.0], "2 of the 8 rows of a step"
    assert numbers(account.settle(rows, answers(0))) == [1.0] * 4
    assert numbers(account.settle(rows, answers(2))) == [None, None, 1.0, 1.0], (
        "the first two are no longer among the last 8"
    )
    with pytest.raises(DataError, match="2 of 8 completions may lack a reward"):
        account.settle(rows, answers(1))


def test_a_resumed_run_counts_failures_before_the_checkpoint() -> None:
    """Of the last 8 rows 2 may fail. By hand: 2 of 4 before the checkpoint and 1 of 4 after it are 3, as in a run that was not
    interrupted; of rows before the last 8 nothing is left."""
    rows = [{"source": f"rows:{number}", "prompt_text": "?"} for number in range(4)]

    def answers(failed: int) -> Answers:
        yield from ((number, None if number < failed else 1.0) for number in range(4))

    def account() -> Account:
        return Account("the judge", max_failed=0.25, field="f", window=8)

    before = account()
    before.settle(rows, answers(2))
    assert before.recent == "1100"
    after = account()
    after.restore(json.loads(json.dumps(before.recent)))
    with pytest.raises(DataError, match="2 of 8 completions may lack a reward"):
        after.settle(rows, answers(1))
    for failed in (0, 2):
        before.settle(rows, answers(failed))
    assert before.recent == "00001100"


@pytest.mark.parametrize("answer", [1e31, -1e39, 1e300, 10**400, float("nan")])
def test_a_number_that_single_precision_could_not_add_up_is_no_reward(answer: float) -> None:
    failure = failure_of(answer)
    assert failure is not None
    assert failure.reason == "bad_number"
    assert str(failure).endswith("a finite number of at most 1e+30 is needed")
    assert failure_of(-1e30) is None


@pytest.mark.parametrize(
    ("share", "size", "allowed"),
    [(0.01, 8, 1), (0.01, 200, 2), (0.1, 16, 1), (0.1, 40, 4), (0.5, 2, 1), (0.0, 1000, 0)],
)
def test_a_single_row_may_fail_unless_max_failed_is_zero(share: float, size: int, allowed: int) -> None:
    """The share of the rows, rounded down; one where that would be none."""
    assert allowed_failures(share, size) == allowed
