"""Sampling episodes in batches: turn by turn, all unfinished ones together; and the sampler that takes turns with training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup
from alignment_core.data.completion_text import CompletionText
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode, version_of
from alignment_core.errors import Stopped
from alignment_core.inference.decoding import Decoding
from alignment_core.inference.engine import Engine
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.rollout import Rollout


@dataclass(frozen=True)
class Sampling:
    """Engines and environments, and the prompts that they sample for."""

    engines: ActorGroup[Engine]
    environments: Environments | None
    schedule: PromptSchedule
    text: CompletionText
    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""
    decoding: Decoding | None
    """Has engines decode what they sample; None with environments, whose episodes have several turns."""
    policy: str
    """Name of the policy before the first step, which no other weights have."""
    stopping: threading.Event
    """Set when the run is being stopped."""

    def complete(self, draws: Sequence[int], version: int) -> list[Rollout]:
        """The completions of these draws, not rewarded. Equal weights and draws give equal completions.

        The engines must hold the policy after ``version`` steps, and sample nothing else. Raises Stopped between two
        shards.
        """
        episodes = [episode for draw in draws for episode in self.schedule.episodes(draw)]
        if self.environments:
            self.environments.answer_all(episodes)
        while live := [episode for episode in episodes if not episode.over]:
            self._sample(live, version)
            if self.environments:
                self.environments.answer_all(live)
        return self.rollouts(episodes)

    def _sample(self, episodes: list[Episode], version: int) -> None:
        """Sample one turn of each episode, in shards small enough that every engine has work."""
        generation = self.schedule.generation
        prompts_per_engine = -(-len(episodes) // (generation.num_generations * self.engines.size))
        size = min(generation.shard_size, prompts_per_engine) * generation.num_generations
        shards = [episodes[first : first + size] for first in range(0, len(episodes), size)]
        policy = version_of(self.policy, version)
        requests = [[self.schedule.request(episode) for episode in shard] for shard in shards]
        calls = (call(Engine.sample, policy, shard, generation, self.stop_ids, self.decoding) for shard in requests)
        for number, completions in self.engines.spread(enumerate(calls)):
            self.check()
            for episode, completion in zip(shards[number], completions.each(), strict=True):
                episode.append_turn(completion)
                episode.over = self.environments is None

    def check(self) -> None:
        """Raise Stopped if the run is being stopped."""
        if self.stopping.is_set():
            raise Stopped("stopped while it sampled")

    def rollouts(self, episodes: Sequence[Episode]) -> list[Rollout]:
        """Episodes that are over as completions, not rewarded."""
        return [Rollout.of(episode, self.text, self.policy) for episode in episodes]


class SyncSampler:
    """Samples only while :meth:`next_batch` is called: each step's completions come from the weights that it starts with."""

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
    def paused(self, version: int, empty: bool) -> Iterator[None]:
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
        """Does nothing: there are no threads to end."""
