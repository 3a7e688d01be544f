"""Rewards and environment of the campaign's reinforcement learning; slow enough to be killed during a call."""

from __future__ import annotations

import time
from typing import Any

CALL_SECONDS = 0.01


def share_of_small_letters(prompt: str, completion: str, label: str | None) -> float:
    """A verifier."""
    time.sleep(CALL_SECONDS)
    return sum(letter.islower() for letter in completion) / max(1, len(completion))


class Echo:
    """An environment of two turns: answers with the length of the first, and rewards lower-case letters of the second."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: str, label: str | None) -> None:
        """Says nothing beside the prompt."""

    def step(self, completion: str) -> dict[str, Any]:
        """Answer a turn of the policy."""
        self.turns += 1
        if self.turns == 1:
            return {"observation": f"{len(completion)} letters, and now?"}
        return {"reward": share_of_small_letters("", completion, None), "done": True}
