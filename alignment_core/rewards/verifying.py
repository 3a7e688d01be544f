"""Rewards of a verifier for many completions: those that it cannot give are counted and left out, never zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignment_core.data import tasks
from alignment_core.errors import DataError, UserError
from alignment_core.rewards.code_tests import CodeTests
from alignment_core.rewards.failures import Account, Answers, Failed, numbers
from alignment_core.rewards.verifiers import CODE, FIELD, FUNCTIONS, TASK
from alignment_core.user_code.process import FunctionProcess

Rows = Sequence[dict[str, Any]]


def verify(
    name: str,
    rows: Rows,
    timeout: float = 60.0,
    max_failed: float = 0.0,
    fields: tuple[str, str] = (FIELD, "evaluation.max_failed_rewards"),
) -> list[float | None]:
    """A number in [0, 1] for each row of rollouts; None where the verifier failed or did not answer in ``timeout`` seconds.

    Raises DataError with the first failure once more than the share ``max_failed`` of the rows have failed. ``fields`` are
    where the recipe has ``name`` and ``max_failed``.
    """
    with Verifier(name, timeout, fields[0]) as verifier:
        return numbers(Account(f"the verifier {name}", max_failed, fields[1]).settle(rows, verifier(rows)))


class Verifier:
    """The verifier of this name, with the processes that it needs, until it is closed; from any thread.

    Raises EnvironmentFault if this machine cannot run the code of ``verifier: code`` within limits.
    """

    def __init__(self, name: str, timeout: float, field: str = FIELD, files: dict[str, str] | None = None) -> None:
        """``files``: as FunctionProcess has them."""
        self.name, self.field = name, field
        self._process = FunctionProcess(FUNCTIONS.get(name, name), timeout, field, files)
        self._tests = CodeTests(field) if name == CODE else None

    def __call__(self, rows: Rows) -> Answers:
        if self.name == TASK:
            yield from ((number, self._of_task(row)) for number, row in enumerate(rows))
        elif self._tests is not None:
            yield from self._tests([(row["completion_text"], row["label"]) for row in rows])
        else:
            calls = [[row["prompt_text"], row["completion_text"], row["label"]] for row in rows]
            for number, score in self._process.answers(calls):
                bad = isinstance(score, float) and not 0 <= score <= 1  # as NaN is
                said = f"answered {score}; a number in [0, 1] is needed"
                yield number, Failed("bad_number", said) if bad else score

    def _of_task(self, row: dict[str, Any]) -> float | Failed:
        if row["task"] is None:
            where = f"{row['source']}: no built-in task, so `verifier: task` cannot score it"
            raise DataError(f"{where}; name a function")
        try:
            return tasks.verify(row["task"], row["prompt_text"], row["completion_text"], row["label"])
        except UserError:
            raise
        except Exception as error:
            return Failed("raised", f"failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._process.close()
        if self._tests is not None:
            self._tests.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
