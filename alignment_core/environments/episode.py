"""An episode: one completion in progress, with the observations between the policy's turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from alignment_core.data.completion_text import CompletionText
    from alignment_core.inference.engine import Completion
    from alignment_core.rewards.results import Failed

NO_ROOM = "no room"
"""The ``finish_reason`` of an episode that its environment would have continued, but whose tokens are used up."""


@dataclass
class Episode:
    """One completion in progress: the policy's turns and the observations between them."""

    draw: int
    """Index of its prompt among all that the run draws."""
    sample: int
    """Which of the prompt's completions."""
    number: int
    """Row of the prompt in the data."""
    prompt: dict[str, Any]
    most_tokens: int
    """That it may have, beside those of the prompt."""
    purpose: str = ""
    """What the draws are for, where it is not training."""
    restarts: int = 0
    """How often it began again."""
    opening: list[int] = field(default_factory=list)
    """Tokens that its environment puts in place of the prompt's, with what is said before the policy's first turn."""
    most: int | None = None
    """Tokens that the policy's next turn may have, where that is fewer."""
    ids: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    """[T] Tokens behind the prompt."""
    mask: np.ndarray = field(default_factory=partial(np.zeros, 0, bool))
    """[T] Whether the policy sampled them."""
    logps: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    versions: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    """[T] Of the weights that sampled each token; of a token that the policy was told, -1."""
    finish_reason: str = ""
    turn_start: int = 0
    """Where in ``ids`` the policy's last turn begins."""
    turns: int = 0
    over: bool = False
    began: float | None = None
    """When its environment was first asked."""
    reward: float = 0.0
    """All that its environment gave."""
    failure: Failed | None = None

    @property
    def name(self) -> str:
        """Tells it from the other episodes of the run."""
        return f"{self.purpose}{self.draw}/{self.sample}"

    @property
    def prompt_ids(self) -> list[int]:
        """What the policy's first turn follows."""
        return self.opening or self.prompt["prompt_ids"]

    @property
    def room(self) -> int:
        """Tokens that it may have: what an opening has more than the prompt comes off."""
        return self.most_tokens - max(0, len(self.prompt_ids) - len(self.prompt["prompt_ids"]))

    @property
    def tokens_left(self) -> int:
        """How many of ``most_tokens`` are left after the turns, the observations and the longer prompt of an opening; 0 if the
        next observation did not fit."""
        return 0 if self.finish_reason == NO_ROOM else self.room - len(self.ids)

    @property
    def policy_tokens(self) -> list[int]:
        """What the policy sampled, over all of its turns."""
        tokens: list[int] = self.ids[self.mask].tolist()
        return tokens

    def take(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        self.turn_start, self.turns = len(self.ids), self.turns + 1
        self._append(completion.token_ids, True, completion.logps, completion.versions)
        self.finish_reason = completion.finish_reason

    def append_observation(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self._append(np.asarray(ids, np.int32), False, 0.0, -1)

    def _append(self, ids: np.ndarray, own: bool, logps: Any, versions: Any) -> None:
        for name, values in {"ids": ids, "mask": own, "logps": logps, "versions": versions}.items():
            before = getattr(self, name)
            after = np.empty(len(before) + len(ids), before.dtype)
            after[: len(before)], after[len(before) :] = before, values
            setattr(self, name, after)

    def restart(self) -> None:
        """Forget all that was said."""
        plan = (self.draw, self.sample, self.number, self.prompt, self.most_tokens, self.purpose)
        vars(self).update(vars(Episode(*plan, restarts=self.restarts + 1)))

    def row(self, text: CompletionText, policy: str) -> dict[str, Any]:
        """As a row of :func:`~alignment_core.rollout.advantages.step_schema`, before any reward."""
        prompt, version = self.prompt, int(self.versions.max(initial=0))
        return {
            "prompt": self.number,
            "sample": self.sample,
            "group": self.draw,
            "prompt_ids": self.prompt_ids,
            "completion_ids": self.ids,
            "mask": self.mask,
            "rollout_logps": self.logps,
            "versions": self.versions,
            "finish_reason": self.finish_reason,
            "tokens_left": self.tokens_left,
            "prompt_text": prompt["prompt"],
            "completion_text": text(self.ids.tolist(), self.finish_reason, self.mask.tolist()),
            "label": prompt["label"],
            "task": prompt["task"],
            "messages": prompt.get("messages"),
            "tools": prompt.get("tools"),
            "columns": prompt.get("columns"),
            "source": prompt["source"],
            "policy": version_of(policy, version),
            "environment": self.failure or self.reward,
        }


def version_of(policy: str, steps: int) -> str:
    """Name of the policy that a run makes of ``policy`` in so many steps."""
    return f"{policy}+{steps}" if steps else policy
