"""An example environment with two turns: the policy needs the first observation to answer in the second turn."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

from alignment_core.data import tasks


class SecondQuestion:
    """Whatever the policy says, it is asked another question of a built-in task, and rewarded for that answer alone."""

    def __init__(self, names: tuple[str, ...] = ("first", "last")) -> None:
        """``names`` are the built-in tasks that questions come from."""
        self.names = names
        self.turns = 0

    def reset(self, prompt: str, label: str | None) -> None:
        """The question follows from the prompt, so that all completions of a prompt are asked the same."""
        random = Random(hashlib.sha256(prompt.encode()).digest())
        name = random.choice(self.names)
        self.question = name, tasks.TASKS[name](random)

    def step(self, completion: str) -> dict[str, Any]:
        name, problem = self.question
        self.turns += 1
        if self.turns == 1:
            return {"observation": problem.prompt}
        return {"reward": tasks.verify(name, problem.prompt, completion, problem.answer), "done": True}
