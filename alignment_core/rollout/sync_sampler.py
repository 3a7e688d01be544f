"""Sampling in turn with training: each step's completions come from the weights that it starts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alignment_core.rollout.advantages import Samples
from alignment_core.rollout.sampling import Sampling


class SyncSampler:
    """Samples when it is asked, and is idle otherwise."""

    def __init__(self, sampling: Sampling, reward: Callable[[Samples], Samples], sleeps: bool) -> None:
        """``reward`` gives rows their rewards. Engines that share their devices with the trainers are to sleep meanwhile."""
        self.sampling, self.reward, self.sleeps = sampling, reward, sleeps
        self.drawn, self.version = 0, 0

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on needs to know; plain numbers."""
        return {"drawn": self.drawn, "pending": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a run was."""
        self.drawn = state["drawn"]

    @contextmanager
    def still(self, version: int, empty: bool = False) -> Iterator[None]:
        """The engines are the caller's meanwhile; afterwards they hold this version of the weights."""
        yield
        self.version = version

    def take(self, count: int) -> Samples:
        """Rewarded completions of the next ``count`` prompts."""
        draws = range(self.drawn, self.drawn + count)
        self.drawn += count
        return self.reward(self.sampling.complete(draws, self.version))

    def rest(self) -> None:
        """Nothing more is taken before new weights come."""
        if self.sleeps:
            self.sampling.engines.sleep()

    def close(self) -> None:
        """Nothing goes on behind the caller's back."""
