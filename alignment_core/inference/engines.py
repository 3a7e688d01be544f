"""The engines of a run, as the stage that holds them calls them, each call with its deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup
from alignment_core.inference.completions import Completion, Completions, Request
from alignment_core.inference.engine import Engine
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rollout import GenerationConfig

TokenIds = Sequence[int]


@dataclass(frozen=True)
class EngineRequest:
    """What engines are to hold."""

    policy: Model
    max_model_len: int
    """Tokens of the longest sequence, prompt and completion."""


class Engines:
    """All engines hold the same weights; each method is that of :class:`Engine`, which says more of it."""

    def __init__(self, group: ActorGroup[Engine]) -> None:
        self.group = group

    @property
    def size(self) -> int:
        """How many engines there are."""
        return self.group.size

    @property
    def timeout(self) -> float:
        """Seconds for one call."""
        return self.group.timeout

    def load(self, model: Path, policy: str) -> float:
        """Put the weights of the folder ``model`` into all of them; seconds it took (0 if they are in them)."""
        return max(self.group.all(Engine.load, model, policy))

    def begin_update(self) -> None:
        """Make ready for new weights, which come in buckets to ``Engine.take_bucket``."""
        self.group.all(Engine.begin_update)

    def end_update(self, policy: str, version: int) -> None:
        """All new weights are there."""
        self.group.all(Engine.end_update, policy, version)

    def use_adapter(self, policy: str, version: int) -> None:
        """The new adapter is there, which ``Engine.take_adapter`` took."""
        self.group.all(Engine.use_adapter, policy, version)

    def sleep(self) -> None:
        """Give the GPUs' memory away until new weights come."""
        self.group.all(Engine.sleep)

    def drop_all(self) -> None:
        """Forget what is under way."""
        self.group.all(Engine.drop_all)

    def generate(
        self,
        policy: str,
        shards: Iterable[tuple[int, Sequence[TokenIds], int]],
        config: GenerationConfig,
        stop_ids: Sequence[int],
        seed: int,
    ) -> Iterator[tuple[int, Completions]]:
        """Completions of the prompts of each shard: (its number, prompts, number of the first prompt), as they come."""
        calls = (
            (number, call(Engine.generate, policy, prompts, config, stop_ids, seed, first))
            for number, prompts, first in shards
        )
        return self.group.spread(calls)

    def sample(
        self,
        policy: str,
        shards: Iterable[tuple[int, Sequence[Request]]],
        config: GenerationConfig,
        stop_ids: Sequence[int],
    ) -> Iterator[tuple[int, Completions]]:
        """One completion for each request of each shard (number, requests), as they come."""
        calls = ((number, call(Engine.sample, policy, requests, config, stop_ids)) for number, requests in shards)
        return self.group.spread(calls)

    def advance(
        self, engine: int, fresh: Sequence[Request], config: GenerationConfig, stop_ids: Sequence[int], seconds: float
    ) -> list[tuple[str, Completion]]:
        """Have one engine sample for about ``seconds`` at what is under way in it and at ``fresh`` requests; what is done."""
        return self.group.one(engine, Engine.advance, fresh, config, stop_ids, seconds)

    def parity(self, model: Model, prompts: Sequence[TokenIds], stop_ids: Sequence[int], again: bool) -> float | None:
        """Largest difference, in nats, between the log-probabilities of the first engine and those of ``model``.

        None where that was looked at before, unless ``again``.
        """
        method = Engine.parity if again else Engine.first_parity
        return self.group.one(0, method, model, prompts, stop_ids)
