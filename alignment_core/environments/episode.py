"""An episode: one completion in progress, with the observations between the policy's turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from alignment_core.data.completion_text import Texts
    from alignment_core.inference.completions import Completion
    from alignment_core.rewards.results import Failed

NO_ROOM = "no room"
"""The ``finish_reason`` of an episode that its environment would have continued, but whose tokens are used up."""


@dataclass
class Episode:
    """One completion in progress: the policy's turns and the observations between them."""

    draw: int
    """Index of its prompt among all prompts that the run draws."""
    sample: int
    """Number of the completion among the prompt's."""
    number: int
    """Row of the prompt in the data."""
    prompt: dict[str, Any]
    most_tokens: int
    """Maximum number of tokens beside the prompt's."""
    purpose: str = ""
    """Prefix of the name of episodes that are not for training."""
    restarts: int = 0
    """Number of restarts."""
    opening: list[int] = field(default_factory=list)
    """Tokens that replace the prompt's: prompt and first observation of the environment."""
    images: tuple[Path, ...] = ()
    """Paths of the images in its tokens, in their order: at first those of the prompt."""
    most: int | None = None
    """Maximum number of tokens of the policy's next turn, if it is smaller."""
    ids: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    """[T] Tokens after the prompt."""
    mask: np.ndarray = field(default_factory=partial(np.zeros, 0, bool))
    """[T] Whether the policy sampled them."""
    logps: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    versions: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    """[T] Version of the weights that sampled each token. Observation tokens: −1."""
    finish_reason: str = ""
    texts: Texts | None = None
    """Texts of its only turn, if it has no environment."""
    turn_start: int = 0
    """Start of the policy's last turn in ``ids``."""
    turns: int = 0
    over: bool = False
    began: bool = False
    """Whether its environment was called."""
    seconds: float = 0.0
    """Sum of the times of its environment's calls."""
    reward: float = 0.0
    """Sum of the environment's rewards."""
    failure: Failed | None = None

    def __post_init__(self) -> None:
        self.images = tuple(self.prompt.get("images") or ())

    @property
    def name(self) -> str:
        """Unique within the run."""
        return f"{self.purpose}{self.draw}/{self.sample}"

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the policy's first turn."""
        return self.opening or self.prompt["prompt_ids"]

    @property
    def room(self) -> int:
        """Maximum number of tokens: those that an opening has more than the prompt count."""
        return self.most_tokens - max(0, len(self.prompt_ids) - len(self.prompt["prompt_ids"]))

    @property
    def tokens_left(self) -> int:
        """Tokens that are left after turns, observations and the longer prompt of an opening; 0 if the next observation did not
        fit."""
        return 0 if self.finish_reason == NO_ROOM else self.room - len(self.ids)

    def append_turn(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        self.turn_start = len(self.ids)
        self.turns += 1
        self._append(completion.token_ids, True, completion.logps, completion.versions)
        self.finish_reason = completion.finish_reason
        self.texts = completion.texts

    def append_observation(self, ids: Sequence[int], images: Sequence[Path] = ()) -> None:
        """Append tokens that the policy did not sample, with the images among them."""
        self._append(np.asarray(ids, np.int32), False, 0.0, -1)
        self.images += tuple(images)

    def _append(self, ids: np.ndarray, own: bool, logps: Any, versions: Any) -> None:
        for name, values in {"ids": ids, "mask": own, "logps": logps, "versions": versions}.items():
            before = getattr(self, name)
            after = np.empty(len(before) + len(ids), before.dtype)
            after[: len(before)], after[len(before) :] = before, values
            setattr(self, name, after)

    def restart(self) -> None:
        """Begin again without any turn."""
        plan = (self.draw, self.sample, self.number, self.prompt, self.most_tokens, self.purpose)
        vars(self).update(vars(Episode(*plan, restarts=self.restarts + 1)))


def version_of(policy: str, steps: int) -> str:
    """Name of the policy that a run makes of ``policy`` in so many steps."""
    return f"{policy}+{steps}" if steps else policy
