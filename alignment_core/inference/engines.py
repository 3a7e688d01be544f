"""The engines of a run, as the stage that holds them calls them, each call with its deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alignment_core.cluster.group import ActorGroup, call
from alignment_core.inference.engine import Completion, Completions, Engine, Request
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

    def __init__(self, group: ActorGroup[Engine], timeout: float) -> None:
        """``timeout``: seconds for one call."""
        self.group, self.timeout = group, timeout

    @property
    def size(self) -> int:
        """How many engines there are."""
        return self.group.size

    def load(self, model: Path, policy: str) -> float:
        """Put the weights of the folder ``model`` into all of them; seconds it took (0 if they are in them)."""
        return max(self.group.all(call(Engine.load, model, policy), self.timeout))

    def begin_update(self) -> None:
        """Make ready for new weights, which come in buckets to ``Engine.take_bucket``."""
        self.group.all(call(Engine.begin_update), self.timeout)

    def end_update(self, policy: str, version: int) -> None:
        """All new weights are there."""
        self.group.all(call(Engine.end_update, policy, version), self.timeout)

    def use_adapter(self, policy: str, version: int) -> None:
        """The new adapter is there, which ``Engine.take_adapter`` took."""
        self.group.all(call(Engine.use_adapter, policy, version), self.timeout)

    def sleep(self) -> None:
        """Give the GPUs' memory away until new weights come."""
        self.group.all(call(Engine.sleep), self.timeout)

    def drop_all(self) -> None:
        """Forget what is under way."""
        self.group.all(call(Engine.drop_all), self.timeout)

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
        return self.group.spread(calls, self.timeout)

    def sample(
        self,
        policy: str,
        shards: Iterable[tuple[int, Sequence[Request]]],
        config: GenerationConfig,
        stop_ids: Sequence[int],
    ) -> Iterator[tuple[int, Completions]]:
        """One completion for each request of each shard (number, requests), as they come."""
        calls = ((number, call(Engine.sample, policy, requests, config, stop_ids)) for number, requests in shards)
        return self.group.spread(calls, self.timeout)

    def advance(
        self, engine: int, fresh: Sequence[Request], config: GenerationConfig, stop_ids: Sequence[int], seconds: float
    ) -> list[tuple[str, Completion]]:
        """Have one engine sample for about ``seconds`` at what is under way in it and at ``fresh`` requests; what is done."""
        return self.group.one(engine, call(Engine.advance, fresh, config, stop_ids, seconds), self.timeout)

    def parity(self, model: Model, prompts: Sequence[TokenIds], stop_ids: Sequence[int], again: bool) -> float | None:
        """Largest difference, in nats, between the log-probabilities of the first engine and those of ``model``.

        None where that was looked at before, unless ``again``.
        """
        method = Engine.parity if again else Engine.first_parity
        return self.group.one(0, call(method, model, prompts, stop_ids), self.timeout)
