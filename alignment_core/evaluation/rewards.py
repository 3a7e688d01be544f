"""Rewards of a verifier for many completions: those that it cannot give are counted and left out, never zero."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from alignment_core.data import tasks
from alignment_core.errors import DataError, UserError
from alignment_core.evaluation.verifier_process import Failed, VerifierProcess
from alignment_core.evaluation.verifiers import FIELD, TASK

log = logging.getLogger(__name__)

SHOWN = 60
"""Characters of a prompt that a message shows."""


def verify(
    name: str,
    rows: Sequence[dict[str, Any]],
    timeout: float = 60.0,
    max_failed: float = 0.0,
    fields: tuple[str, str] = (FIELD, "evaluation.max_failed_rewards"),
) -> list[float | None]:
    """A number in [0, 1] for each row of rollouts; None where the verifier failed or did not answer in ``timeout`` seconds.

    Raises DataError with the first failure once more than the share ``max_failed`` of the rows have failed. ``fields`` are
    where the recipe has ``name`` and ``max_failed``.
    """
    allowed, first, failed = math.floor(max_failed * len(rows)), "", 0
    rewards: list[float | None] = []
    with VerifierProcess(name, timeout, fields[0]) as process:
        for row in rows:
            try:
                rewards.append(_reward(name, process, row))
            except Failed as error:
                failed += 1
                said = f"{row['source']}: the verifier {name} {error}, for the prompt {row['prompt_text'][:SHOWN]!r}"
                first = first or said
                if failed > allowed:
                    raise DataError(
                        f"{first}; {allowed} of {len(rows)} completions may go without a reward "
                        f"({fields[1]} {max_failed:g})"
                    ) from None
                log.warning("%s; it is left out", said)
                rewards.append(None)
    return rewards


def _reward(name: str, process: VerifierProcess, row: dict[str, Any]) -> float:
    prompt, completion, label = row["prompt_text"], row["completion_text"], row["label"]
    if name != TASK:
        score = process.score(prompt, completion, label)
    elif row["task"] is None:
        raise DataError(f"{row['source']}: no built-in task, so `verifier: task` cannot score it; name a function")
    else:
        try:
            score = tasks.verify(row["task"], prompt, completion, label)
        except UserError:
            raise
        except Exception as error:
            raise Failed(f"failed: {type(error).__name__}: {error}") from error
    if not (math.isfinite(score) and 0 <= score <= 1):
        raise Failed(f"answered {score}; a number in [0, 1] is needed")
    return score
