"""Sampling in turn with training: each step's completions come from the weights that it starts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alignment_core.inference.engine import Engine
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.sampling import Sampling


class SyncSampler:
    """Samples only while :meth:`next_batch` is called."""

    def __init__(
        self, sampling: Sampling, reward: Callable[[list[Rollout]], list[Rollout]], sleeps_in_training: bool
    ) -> None:
        """``reward`` adds rewards to completions. With ``sleeps_in_training`` the engines free the memory of the devices that
        they share with the trainers."""
        self.sampling = sampling
        self.reward = reward
        self.sleeps_in_training = sleeps_in_training
        self.drawn = 0
        self.version = 0

    @property
    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"drawn": self.drawn, "pending": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.drawn = state["drawn"]

    @contextmanager
    def paused(self, version: int, empty: bool = False) -> Iterator[None]:
        """Leave the engines to the caller; afterwards they hold the weights of this version."""
        yield
        self.version = version

    def next_batch(self, count: int) -> list[Rollout]:
        """Rewarded completions of the next ``count`` prompts."""
        draws = range(self.drawn, self.drawn + count)
        self.drawn += count
        return self.reward(self.sampling.complete(draws, self.version))

    def release(self) -> None:
        """Free the engines' devices until new weights come: no further batch is needed before."""
        if self.sleeps_in_training:
            self.sampling.engines.all(Engine.sleep)

    def close(self) -> None:
        """Nothing runs in the background."""
