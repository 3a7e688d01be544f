"""Completions without a reward: why, how many, which, and when there are too many. One account for every kind of reward.

None in place of a reward has two meanings. It is a failure, or the source leaves the completion to the other rewards, as in
TRL, where the functions of several tasks return None for each other's rows (``missing`` of a reward says which).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Literal

from alignment_core.errors import DataError
from alignment_core.user_code.errors import Failed, Reason

log = logging.getLogger(__name__)

LARGEST = 1e30
"""What a reward may be: it is stored in single precision, where weights and sums of rewards have to fit, too."""
SHOWN = 60
"""Characters of a prompt that a message shows."""

Answers = Generator[tuple[int, Any], None, None]
"""The number of each row, in any order, and its reward, None if it is to have none, :class:`Ignored`, or the :class:`Failed`
that says why."""


class Ignored:
    """The answer of a source whose None means by itself that the other rewards count alone."""


IGNORED = Ignored()


class RewardValue(float):
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
    ) -> RewardValue:
        given = super().__new__(cls, reward)
        given.score, given.extra, given.steps = score, extra or {}, steps
        return given


RewardResult = float | Failed | None
"""Of one source for one completion: a finite number, why there is none, or None where the source ignores the completion."""


def scores(rewards: Sequence[RewardResult]) -> list[float | None]:
    """As :func:`numbers`, of what sources give as scores where they do."""
    found = [one.score if isinstance(one, RewardValue) and one.score is not None else one for one in rewards]
    return numbers(found)


def extras(rewards: Sequence[RewardResult]) -> dict[str, float]:
    """The numbers to show of one completion; those of later sources come first where names are the same."""
    return {name: value for one in rewards if isinstance(one, RewardValue) for name, value in one.extra.items()}


def allowed_failures(share: float, size: int) -> int:
    """How many of ``size`` rows may fail: the share, rounded down, and at least one unless the share is 0."""
    return max(math.floor(share * size), 1 if share else 0)


class Account:
    """What one source of rewards gave and failed to give; counts over all calls in ``failed``."""

    def __init__(
        self,
        who: str,
        max_failed: float,
        field: str,
        window: int = 0,
        missing: Literal["ignore", "fail"] | None = None,
    ) -> None:
        """``max_failed`` is a share of the last ``window`` rows, or of those of a call where it has more. ``missing`` is the
        meaning of None; by default what the source says (see :class:`Ignored`), otherwise a failure."""
        self.who, self.max_failed, self.field = who, max_failed, field
        self.missing = missing
        self.failed: Counter[Reason] = Counter()
        self.window, self._recent = window, deque[bool](maxlen=window)

    @property
    def recent(self) -> str:
        """Which of the last ``window`` rows failed, a digit 0 or 1 for each: plain data for a checkpoint."""
        return "".join(str(int(failed)) for failed in list(self._recent))

    def restore(self, recent: str) -> None:
        """Continue with the last rows of the run that wrote :attr:`recent`."""
        self._recent.extend(digit == "1" for digit in recent)

    def settle(self, rows: Sequence[dict[str, Any]], answers: Answers) -> list[RewardResult]:
        """The reward of each row of rollouts; the reason of a failure is logged with the row.

        Raises DataError with the first failure, and ends ``answers``, once more of the last rows have failed than
        ``max_failed`` allows (see :func:`allowed_failures`).
        """
        size = max(self.window, len(rows))
        failed = sum(list(self._recent)[len(rows) - size :]) if size > len(rows) else 0
        allowed, first = allowed_failures(self.max_failed, size), ""
        rewards: dict[int, RewardResult] = {}
        with closing(answers):
            for number, answer in answers:
                failure = rewards[number] = self.result(answer)
                if not isinstance(failure, Failed):
                    continue
                failed += 1
                self.failed[failure.reason] += 1
                row = rows[number]
                hint = "; `missing: ignore` leaves it to the other rewards" if self._may_ignore(answer) else ""
                sentence = f"{row['source']}: {self.who} {failure}, for the prompt {row['prompt_text'][:SHOWN]!r}"
                first = first or f"{sentence}{hint}"
                if failed > allowed:
                    raise DataError(
                        f"{first}; {allowed} of {size} completions may lack a reward ({self.field} {self.max_failed:g})"
                    )
                log.warning("%s; it is left out", sentence)
        found = [rewards[number] for number in range(len(rows))]
        self._recent.extend(isinstance(reward, Failed) for reward in found)
        return found

    def result(self, answer: Any) -> RewardResult:
        """An answer as a number, None where it leaves its completion to the other rewards, or the reason of its failure."""
        if self._ignores(answer):
            return None
        failure = failure_of(answer)
        if failure is not None:
            return failure
        return answer if isinstance(answer, RewardValue) else float(answer)

    def _may_ignore(self, answer: Any) -> bool:
        """Whether nobody has said yet what None means, and a field says it."""
        return answer is None and self.missing is None and self.field.endswith(".max_failed")

    def _ignores(self, answer: Any) -> bool:
        """Whether an answer leaves its completion to the other rewards."""
        if answer is IGNORED:
            return self.missing != "fail"
        return answer is None and self.missing == "ignore"


class MissingRewards:
    """How many completions some sources ignored, by source, and how many of them all sources did."""

    def __init__(self, sources: int, state: Sequence[int] = ()) -> None:
        """``state``: that of an earlier one, to count on from."""
        self.completions, self.without, *self.ignored = state or [0] * (sources + 2)

    @property
    def state(self) -> list[int]:
        """Plain numbers that make an equal one."""
        return [self.completions, self.without, *self.ignored]

    def add(
        self, rewards: Sequence[Sequence[float | None]], failures: Sequence[Sequence[Reason | None] | None]
    ) -> None:
        """Count completions, with their :func:`numbers` and :func:`reasons`."""
        self.completions += len(rewards)
        for given, reason in zip(rewards, failures, strict=True):
            if reason is not None:
                self.without += all(one is None for one in given) and set(reason) == {"none_given"}
            elif None in given:
                self.ignored = [count + (one is None) for count, one in zip(self.ignored, given, strict=True)]

    def warnings(self, sources: Sequence[str], field: str) -> list[str]:
        """Sentences with the counts; ``sources`` are their names, which the recipe has at ``field``."""
        found = [
            f"{field}.{number}: {who} returned None for {count} of {self.completions} completions that have "
            "other rewards, whose sum is used (missing: ignore)"
            for number, (who, count) in enumerate(zip(sources, self.ignored, strict=True))
            if count
        ]
        if self.without:
            found.append(
                f"{field}: {self.without} of {self.completions} completions have no reward, because every reward returned "
                "None; they are left out"
            )
        return found


def numbers(rewards: Sequence[RewardResult]) -> list[float | None]:
    """Rewards without the reasons of those that are missing."""
    return [None if one is None or isinstance(one, Failed) else float(one) for one in rewards]


def reasons(rewards: Sequence[RewardResult]) -> list[Reason | None] | None:
    """Why a completion with these rewards, one of each source, is not rewarded; None if it is: at least one source has a
    number, and none has failed. Not the messages, which may differ from run to run."""
    if all(one is None for one in rewards):
        return ["none_given"] * len(rewards)
    found = [one.reason if isinstance(one, Failed) else None for one in rewards]
    return found if any(found) else None


def failure_of(answer: Any) -> Failed | None:
    """Why an answer is no reward, None if it is one."""
    if isinstance(answer, Failed):
        return answer
    if answer is None or answer is IGNORED:
        return Failed("none_given", "gave no reward")
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]!r}; a number is needed")
    if not abs(answer) <= LARGEST:  # NaN neither
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]}; a finite number of at most {LARGEST:g} is needed")
    return None
