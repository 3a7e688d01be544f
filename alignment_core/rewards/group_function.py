"""A user function that rewards all completions of a prompt at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment_core.data.messages import as_given, tools_of
from alignment_core.rewards.results import IGNORED, Answers, Ignored, RewardValue, failure_of
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.pool import Elsewhere, FunctionPool

PLAIN = (str, int, float, bool, list, type(None))
REPLACED = ("prompt_text", "completion_text", "special_text", "columns")
"""Columns that a function gets under another name, or unpacked."""


class GroupFunction:
    """Rewards from the function ``name``, one call for each prompt, in processes of its own until it is closed."""

    def __init__(
        self,
        name: str,
        timeout: float,
        field: str,
        processes: int | None = 1,
        elsewhere: Elsewhere | None = None,
        load_timeout: float | None = None,
    ) -> None:
        """``processes``, ``elsewhere`` and ``load_timeout`` as FunctionPool has them."""
        self._pool = FunctionPool(name, timeout, field, processes, elsewhere=elsewhere, load_timeout=load_timeout)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Answers:
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(row["group"], []).append(number)
        members = list(groups.values())
        calls = [[[_seen(rows[number]) for number in numbers]] for numbers in members]
        for index, answer in self._pool.answers(calls):
            numbers = members[index]
            if isinstance(answer, dict):
                answer = _with_extras(answer, len(numbers))
            if not isinstance(answer, Failed) and not (isinstance(answer, list) and len(answer) == len(numbers)):
                many = (
                    f"{len(answer)} numbers"
                    if isinstance(answer, list)
                    else f"{answer}, which is not a list of numbers,"
                )
                answer = Failed("wrong_shape", f"returned {many} for {len(numbers)} completions")
            yield from zip(numbers, [answer] * len(numbers) if isinstance(answer, Failed) else answer, strict=True)

    def close(self) -> None:
        self._pool.close()


def _with_extras(answer: dict[str, Any], count: int) -> list[RewardValue | Ignored | Failed] | Failed:
    """The rewards of an answer that has scores and further numbers beside them: each a list of as many, or one for all.

    Further numbers that are none, or not finite, are left out. With ``none_is_ignored`` a reward that is None is
    :class:`Ignored`.
    """
    rewards, scores, extra = answer.get("rewards"), answer.get("scores"), answer.get("extra_logs")
    extra = {} if extra is None else extra
    if not isinstance(extra, dict):
        return Failed("wrong_shape", f"returned {extra} as 'extra_logs'; a dict is needed")
    if not isinstance(rewards, list):
        return Failed("wrong_shape", f"returned {rewards} as 'rewards' for {count} completions")
    for name, values in [("rewards", rewards), ("scores", scores), *extra.items()]:
        if isinstance(values, list) and len(values) != count:
            return Failed("wrong_shape", f"returned {values} as {name!r} for {count} completions")

    def at(values: Any, place: int) -> Any:
        value = values[place] if isinstance(values, list) else values
        return float(value) if isinstance(value, bool) else value

    def given(place: int) -> RewardValue | Ignored | Failed:
        reward, score = at(rewards, place), at(scores, place)
        if reward is None and answer.get("none_is_ignored"):
            return IGNORED
        failure = failure_of(reward) or (None if score is None else failure_of(score))
        shown = {name: at(values, place) for name, values in extra.items()}
        finite = {name: float(value) for name, value in shown.items() if failure_of(value) is None}
        return failure or RewardValue(reward, score, finite)

    return [given(place) for place in range(count)]


def _seen(row: dict[str, Any]) -> dict[str, Any]:
    """The argument of the function for a completion: texts as ``prompt`` and ``completion``, the prompt's messages if it has
    any, the columns that its data keeps, and all other plain values."""
    seen = {name: value for name, value in row.items() if isinstance(value, PLAIN) and name not in REPLACED}
    prompt, kept = as_given(row), row.get("columns")
    return {
        **seen,
        "tools": tools_of(row),
        **(json.loads(kept) if kept else {}),
        "prompt": row["prompt_text"],
        "completion": row["completion_text"],
        "messages": prompt if isinstance(prompt, list) else None,
        **{name: np.asarray(row[name], np.int32) for name in ("prompt_ids", "completion_ids")},
    }
