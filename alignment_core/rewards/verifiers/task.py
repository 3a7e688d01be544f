"""`verifier: task`: whether a completion is correct, according to the built-in task of its prompt."""

from __future__ import annotations

from typing import Any

from alignment_core.data import tasks
from alignment_core.errors import DataError, UserError
from alignment_core.rewards.named import NamedVerifier, Rows
from alignment_core.rewards.results import Answers
from alignment_core.user_code.errors import Failed


class OfTask:
    """The tasks' own verifiers, which run in this process because they are fast and ours."""

    def __call__(self, rows: Rows) -> Answers:
        yield from ((number, self._score(row)) for number, row in enumerate(rows))

    def _score(self, row: dict[str, Any]) -> float | Failed:
        if row["task"] is None:
            where = f"{row['source']}: not a built-in task, so `verifier: task` cannot score it"
            raise DataError(f"{where}; name a function")
        try:
            return tasks.verify(row["task"], row["prompt_text"], row["completion_text"], row["label"])
        except UserError:
            raise
        except Exception as error:
            return Failed("raised", f"failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Nothing was started."""


VERIFIER = NamedVerifier(open=lambda field: OfTask(), tasks_only=True)
