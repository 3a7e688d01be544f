"""Sampling in step with training: each step's completions come from the weights that it starts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alignment_core.rollout.environments import Environments
from alignment_core.rollout.episodes import Draws, Episode, version_of
from alignment_core.rollout.experience import Samples


class InStep:
    """Samples when it is asked. Equal weights and draws give equal completions."""

    def __init__(
        self,
        engines: Any,
        environments: Environments | None,
        draws: Draws,
        tokenizer: Any,
        policy: str,
        reward: Callable[[Samples], Samples],
        wait: float,
    ) -> None:
        """``policy`` is the reference of the policy before the first step; ``reward`` gives rows their rewards."""
        self.engines, self.environments = engines, environments
        self.draws, self.tokenizer, self.policy = draws, tokenizer, policy
        self.reward, self.wait = reward, wait
        self.drawn, self.version = 0, 0

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on needs to know; plain numbers."""
        return {"drawn": self.drawn, "pending": []}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a run was."""
        self.drawn = state["drawn"]

    @contextmanager
    def still(self, version: int) -> Iterator[None]:
        """The engines are the caller's meanwhile; afterwards they hold this version of the weights."""
        yield
        self.version = version

    def take(self, count: int) -> Samples:
        """Rewarded completions of the next ``count`` prompts."""
        episodes = [one for draw in range(self.drawn, self.drawn + count) for one in self.draws.episodes(draw)]
        self.drawn += count
        if self.environments:
            self.environments.answer_all(episodes)
        while live := [episode for episode in episodes if not episode.over]:
            self._sample(live)
            if self.environments:
                self.environments.answer_all(live)
        return self.reward([episode.row(self.tokenizer, self.policy) for episode in episodes])

    def _sample(self, episodes: list[Episode]) -> None:
        generation = self.draws.generation
        size = generation.shard_size * generation.num_generations
        shards = [episodes[first : first + size] for first in range(0, len(episodes), size)]
        policy, stop = version_of(self.policy, self.version), self.tokenizer.eos_token_id
        jobs = [
            (number, (policy, [self.draws.request(one) for one in shard], generation, stop))
            for number, shard in enumerate(shards)
        ]
        for number, said in self.engines.spread("sample", jobs, timeout=self.wait):
            for episode, completion in zip(shards[number], said, strict=True):
                episode.take(completion)
                episode.over = self.environments is None

    def close(self) -> None:
        """Nothing goes on behind the caller's back."""
