"""The account of missing rewards: the same for every kind of source, including reward models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alignment_core.errors import DataError
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.model_reward import Judge
from alignment_core.rewards.results import Account, Answers, numbers
from alignment_core.rewards.scoring_actors import Judges

ROWS: list[dict[str, Any]] = [
    {"source": f"p.jsonl:{number}", "prompt_text": "?", "prompt_ids": [number], "completion_ids": [1]}
    for number in range(4)
]


class Scores:
    """In place of actors: no reward model gives NaN on demand."""

    size = 1

    def spread(self, calls: Any) -> list[Any]:
        return [(first, np.array([1.0, np.nan, -np.inf, 4.0])[: len(call.arguments[0])]) for first, call in calls]


def test_non_finite_scores_of_a_reward_model_are_left_out_and_counted() -> None:
    group: Any = Scores()
    account, judge = (
        Account("the reward model", 0.5, "rl.rewards.0.max_failed"),
        Judge(Judges(group, ResourcesConfig())),
    )
    for _ in range(2):
        assert numbers(account.settle(ROWS, judge(ROWS))) == [1.0, None, None, 4.0]
    assert account.failed == {"bad_number": 4}


def test_the_share_of_failures_is_per_call_and_exceeding_it_ends_the_call() -> None:
    calls = []

    def answers() -> Answers:
        try:
            for number in (2, 0, 1, 3):
                calls.append(number)
                yield number, None if number != 1 else 1.0
        finally:
            calls.append("ended")  # type: ignore[arg-type]

    account = Account("it", 0.25, "rl.rewards.0.max_failed")
    says = (
        r"^p\.jsonl:2: it gave no reward, for the prompt '\?'; `missing: ignore` leaves it to the other rewards; "
        r"1 of 4 completions may lack a reward \(rl\.rewards\.0\."
    )
    with pytest.raises(DataError, match=says):
        account.settle(ROWS, answers())
    assert calls == [2, 0, "ended"]
