"""Sampling episodes in batches: turn by turn, all unfinished ones together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from alignment_core.data.completion_text import CompletionText
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode, version_of
from alignment_core.errors import Stopped
from alignment_core.inference.engines import Engines
from alignment_core.rollout.advantages import Samples
from alignment_core.rollout.prompt_schedule import PromptSchedule


@dataclass(frozen=True)
class Sampling:
    """The engines, the draws that they sample for, and the environments."""

    engines: Engines
    environments: Environments | None
    draws: PromptSchedule
    text: CompletionText
    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""
    policy: str
    """Name of the policy before the first step, which no other weights have."""
    stopping: threading.Event
    """Set when the run is being stopped."""

    def complete(self, draws: Sequence[int], version: int) -> Samples:
        """Rows of the completions of these draws. Equal weights and draws give equal completions.

        The engines must hold the policy after ``version`` steps, and sample nothing else. Raises Stopped between two
        shards.
        """
        episodes = [one for draw in draws for one in self.draws.episodes(draw)]
        if self.environments:
            self.environments.answer_all(episodes)
        while live := [episode for episode in episodes if not episode.over]:
            self._sample(live, version)
            if self.environments:
                self.environments.answer_all(live)
        return self.rows(episodes)

    def _sample(self, episodes: list[Episode], version: int) -> None:
        """One turn of the policy in each, of as many prompts at a time as leave no engine without work."""
        generation = self.draws.generation
        of_an_engine = -(-len(episodes) // (generation.num_generations * self.engines.size))
        size = min(generation.shard_size, of_an_engine) * generation.num_generations
        shards = [episodes[first : first + size] for first in range(0, len(episodes), size)]
        policy = version_of(self.policy, version)
        asked = [(number, [self.draws.request(one) for one in shard]) for number, shard in enumerate(shards)]
        for number, completions in self.engines.sample(policy, asked, generation, self.stop_ids):
            self.check()
            for episode, completion in zip(shards[number], completions.each(), strict=True):
                episode.take(completion)
                episode.over = self.environments is None

    def check(self) -> None:
        """Raise Stopped if the run is being stopped."""
        if self.stopping.is_set():
            raise Stopped("stopped while it sampled")

    def rows(self, episodes: Sequence[Episode]) -> Samples:
        """Episodes that are over as rows without a reward."""
        return [episode.row(self.text, self.policy) for episode in episodes]
