"""Completions without a reward: why, how many, which, and when there are too many. One account for every kind of reward."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from alignment_core.errors import DataError
from alignment_core.user_code.failed import Failed, Reason

log = logging.getLogger(__name__)

LARGEST = 1e30
"""What a reward may be: it is stored in single precision, where weights and sums of rewards have to fit, too."""
SHOWN = 60
"""Characters of a prompt that a message shows."""

Answers = Generator[tuple[int, Any], None, None]
"""The number of each row, in any order, and its reward, None if it is to have none, or the :class:`Failed` that says why."""


class Given(float):
    """A reward with what its source says beside it."""

    score: float | None = None
    """What dynamic filtering looks at in its place."""
    extra: dict[str, float]
    """Numbers to show, by name."""
    steps: tuple[tuple[int, float], ...]
    """Where it is given step by step: the last completion token of each, from 0, and its reward."""

    def __new__(
        cls,
        reward: float,
        score: float | None = None,
        extra: dict[str, float] | None = None,
        steps: tuple[tuple[int, float], ...] = (),
    ) -> Given:
        given = super().__new__(cls, reward)
        given.score, given.extra, given.steps = score, extra or {}, steps
        return given


def scores(rewards: Sequence[float | Failed]) -> list[float | None]:
    """As :func:`numbers`, of what sources give as scores where they do."""
    found = [one.score if isinstance(one, Given) and one.score is not None else one for one in rewards]
    return numbers(found)


def extras(rewards: Sequence[float | Failed]) -> dict[str, float]:
    """The numbers to show of one completion; those of later sources come first where names are the same."""
    return {name: value for one in rewards if isinstance(one, Given) for name, value in one.extra.items()}


class Account:
    """What one source of rewards gave and failed to give; counts over all calls in ``failed``."""

    def __init__(self, who: str, max_failed: float, field: str, window: int = 0) -> None:
        """``max_failed`` is a share of the last ``window`` rows, or of those of a call where it has more."""
        self.who, self.max_failed, self.field = who, max_failed, field
        self.failed: Counter[Reason] = Counter()
        self.window, self._recent = window, deque[bool](maxlen=window)

    @property
    def recent(self) -> str:
        """Which of the last ``window`` rows failed, a digit 0 or 1 for each: plain data for a checkpoint."""
        return "".join(str(int(failed)) for failed in list(self._recent))

    def restore(self, recent: str) -> None:
        """Continue with the last rows of the run that wrote :attr:`recent`."""
        self._recent.extend(digit == "1" for digit in recent)

    def settle(self, rows: Sequence[dict[str, Any]], answers: Answers) -> list[float | Failed]:
        """A finite number for each row of rollouts, or why there is none, which is logged with the row.

        Raises DataError with the first failure, and ends ``answers``, once more than the share ``max_failed`` of the last
        rows have failed.
        """
        size = max(self.window, len(rows))
        failed = sum(list(self._recent)[len(rows) - size :]) if size > len(rows) else 0
        allowed, first = math.floor(self.max_failed * size), ""
        rewards: dict[int, float | Failed] = {}
        with closing(answers):
            for number, answer in answers:
                failure = failure_of(answer)
                if failure is None:
                    rewards[number] = answer if isinstance(answer, Given) else float(answer)
                    continue
                rewards[number] = failure
                failed += 1
                self.failed[failure.reason] += 1
                row = rows[number]
                sentence = f"{row['source']}: {self.who} {failure}, for the prompt {row['prompt_text'][:SHOWN]!r}"
                first = first or sentence
                if failed > allowed:
                    raise DataError(
                        f"{first}; {allowed} of {size} completions may lack a reward ({self.field} {self.max_failed:g})"
                    )
                log.warning("%s; it is left out", sentence)
        found = [rewards[number] for number in range(len(rows))]
        self._recent.extend(isinstance(reward, Failed) for reward in found)
        return found


def numbers(rewards: Sequence[float | Failed]) -> list[float | None]:
    """Rewards without the reasons of those that are missing."""
    return [None if isinstance(one, Failed) else float(one) for one in rewards]


def reasons(rewards: Sequence[float | Failed]) -> list[Reason | None] | None:
    """The reasons of those that are missing, None if none is. Not their messages, which may differ from run to run."""
    found = [one.reason if isinstance(one, Failed) else None for one in rewards]
    return found if any(found) else None


def failure_of(answer: Any) -> Failed | None:
    """Why an answer is no reward, None if it is one."""
    if isinstance(answer, Failed):
        return answer
    if answer is None:
        return Failed("none_given", "gave no reward")
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]!r}; a number is needed")
    if not abs(answer) <= LARGEST:  # NaN neither
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]}; a finite number of at most {LARGEST:g} is needed")
    return None
