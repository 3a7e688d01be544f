"""Results of rewards: values, reasons of missing ones, and the limit on failures, which is the same for every kind of reward.

None in place of a reward has two meanings. It is a failure, or the reward ignores the completion so that only the others
count, as in TRL, where the functions of several tasks return None for each other's rows (``missing`` of a reward decides).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment_core.errors import DataError
from alignment_core.heartbeat import beating
from alignment_core.user_code.errors import Failed, Reason

log = logging.getLogger(__name__)

LARGEST = 1e30
"""Largest absolute reward: rewards, their weights and their sums are stored in single precision."""
SHOWN = 60
"""Characters of a prompt that a message shows."""

Answers = Generator[tuple[int, Any], None, None]
"""Numbers of rows, in any order, each with its reward: a number, a :class:`RewardValue`, None, :class:`Ignored` or
:class:`Failed`."""


class Ignored:
    """The answer of a reward that ignores the completion by itself, as functions in TRL's form do by None."""


IGNORED = Ignored()


@dataclass(frozen=True)
class RewardValue:
    """A reward with further numbers from its source."""

    reward: float
    score: float | None = None
    """Replaces the reward in dynamic filtering."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Numbers to show, by name."""
    steps: tuple[tuple[int, float], ...] = ()
    """For a reward that is given step by step: the last completion token of each step, from 0, and the step's reward."""


RewardResult = float | RewardValue | Failed | None
"""Result of one reward for one completion: a finite number, the reason of a failure, or None if it is ignored."""


def scores(rewards: Sequence[RewardResult]) -> list[float | None]:
    """As :func:`numbers`, with scores in place of rewards where there are any."""
    return numbers(
        [result.score if isinstance(result, RewardValue) and result.score is not None else result for result in rewards]
    )


def extras(rewards: Sequence[RewardResult]) -> dict[str, float]:
    """The numbers to show of one completion; if names are equal, the later reward's."""
    return {
        name: value for result in rewards if isinstance(result, RewardValue) for name, value in result.extra.items()
    }


def allowed_failures(share: float, size: int) -> int:
    """Number of ``size`` rows that may fail: the share, rounded down, and at least one unless the share is 0."""
    return max(math.floor(share * size), 1 if share else 0)


class Account:
    """Checks the answers of one reward, and counts its failures over all calls in ``failed``."""

    def __init__(
        self,
        description: str,
        max_failed: float,
        field: str,
        window: int = 0,
        missing: Literal["ignore", "fail"] | None = None,
    ) -> None:
        """``max_failed`` is a share of the last ``window`` rows, or of the rows of a call if it has more. ``missing`` is the
        meaning of None; by default :class:`Ignored` is ignored, and None is a failure."""
        self.description = description
        self.max_failed = max_failed
        self.field = field
        self.missing = missing
        self.failed: Counter[Reason] = Counter()
        self.window = window
        self._recent = deque[bool](maxlen=window)

    @property
    def recent(self) -> str:
        """A digit for each of the last ``window`` rows, 1 if it failed: plain data for a checkpoint."""
        return "".join(str(int(failed)) for failed in list(self._recent))

    def restore(self, recent: str) -> None:
        """Continue with the last rows of the run that wrote :attr:`recent`."""
        self._recent.extend(digit == "1" for digit in recent)

    def settle(self, rows: Sequence[dict[str, Any]], answers: Answers) -> list[RewardResult]:
        """The result for each row; failures are logged with their rows.

        Raises DataError with the first failure, and closes ``answers``, once more of the last rows have failed than
        ``max_failed`` allows (see :func:`allowed_failures`).
        """
        size = max(self.window, len(rows))
        failed = sum(list(self._recent)[len(rows) - size :]) if size > len(rows) else 0
        allowed, first = allowed_failures(self.max_failed, size), ""
        rewards: dict[int, RewardResult] = {}
        with closing(answers):
            for number, answer in beating(answers):
                failure = rewards[number] = self.result(answer)
                if not isinstance(failure, Failed):
                    continue
                failed += 1
                self.failed[failure.reason] += 1
                row = rows[number]
                hint = "; `missing: ignore` leaves it to the other rewards" if self._may_ignore(answer) else ""
                sentence = (
                    f"{row['source']}: {self.description} {failure}, for the prompt {row['prompt_text'][:SHOWN]!r}"
                )
                first = first or f"{sentence}{hint}"
                if failed > allowed:
                    raise DataError(
                        f"{first}; {allowed} of {size} completions may lack a reward ({self.field} {self.max_failed:g})"
                    )
                log.warning("%s; it is left out", sentence)
        results = [rewards[number] for number in range(len(rows))]
        self._recent.extend(isinstance(result, Failed) for result in results)
        return results

    def result(self, answer: Any) -> RewardResult:
        """The result of an answer."""
        if self._ignores(answer):
            return None
        failure = failure_of(answer)
        if failure is not None:
            return failure
        return answer if isinstance(answer, RewardValue) else float(answer)

    def _may_ignore(self, answer: Any) -> bool:
        """Whether the recipe could set ``missing: ignore`` for this None."""
        return answer is None and self.missing is None and self.field.endswith(".max_failed")

    def _ignores(self, answer: Any) -> bool:
        """Whether the completion is left to the other rewards."""
        if answer is IGNORED:
            return self.missing != "fail"
        return answer is None and self.missing == "ignore"


class MissingRewards:
    """Counts completions that rewards ignored: by reward, and those that all rewards ignored."""

    def __init__(self, sources: int, state: Sequence[int] = ()) -> None:
        """``state``: the counts to continue from."""
        self.completions, self.without, *self.ignored = state or [0] * (sources + 2)

    @property
    def state(self) -> list[int]:
        """Plain numbers for a checkpoint."""
        return [self.completions, self.without, *self.ignored]

    def add(
        self, rewards: Sequence[Sequence[float | None]], failures: Sequence[Sequence[Reason | None] | None]
    ) -> None:
        """Count completions, with their :func:`numbers` and :func:`reasons`."""
        self.completions += len(rewards)
        for given, reason in zip(rewards, failures, strict=True):
            if reason is not None:
                self.without += all(value is None for value in given) and set(reason) == {"none_given"}
            elif None in given:
                self.ignored = [count + (value is None) for count, value in zip(self.ignored, given, strict=True)]

    def warnings(self, sources: Sequence[str], field: str) -> list[str]:
        """Sentences with the counts. ``sources`` names the rewards of the recipe's ``field``."""
        warnings = [
            f"{field}.{number}: {source} returned None for {count} of {self.completions} completions that have "
            "other rewards, whose sum is used (missing: ignore)"
            for number, (source, count) in enumerate(zip(sources, self.ignored, strict=True))
            if count
        ]
        if self.without:
            warnings.append(
                f"{field}: {self.without} of {self.completions} completions have no reward, because every reward returned "
                "None; they are left out"
            )
        return warnings


def numbers(rewards: Sequence[RewardResult]) -> list[float | None]:
    """The rewards as plain numbers, None for missing ones."""
    values = [result.reward if isinstance(result, RewardValue) else result for result in rewards]
    return [None if result is None or isinstance(result, Failed) else float(result) for result in values]


def reasons(rewards: Sequence[RewardResult]) -> list[Reason | None] | None:
    """Why a completion with these results, one for each reward, is not rewarded; None if it is: at least one of them is a
    number, and none has failed. Not the messages, which may differ from run to run."""
    if all(result is None for result in rewards):
        return ["none_given"] * len(rewards)
    by_reward = [result.reason if isinstance(result, Failed) else None for result in rewards]
    return by_reward if any(by_reward) else None


def failure_of(answer: Any) -> Failed | None:
    """The failure that an answer means; None if it is a reward."""
    if isinstance(answer, RewardValue):
        answer = answer.reward
    if isinstance(answer, Failed):
        return answer
    if answer is None or answer is IGNORED:
        return Failed("none_given", "gave no reward")
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]!r}; a number is needed")
    if not abs(answer) <= LARGEST:  # also refuses NaN
        return Failed("bad_number", f"returned {str(answer)[:SHOWN]}; a finite number of at most {LARGEST:g} is needed")
    return None
