"""A step's prompts are divided among the engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.recipes import GenerationConfig
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.sampling import Sampling

SAMPLES = 2


class Engines:
    """Records the size of each shard; engines themselves do not matter for how prompts are divided."""

    def __init__(self, size: int) -> None:
        self.size, self.shards = size, list[int]()

    def spread(self, calls: Any) -> Iterator[Any]:
        for number, call in calls:
            _, requests, *_ = call.arguments
            self.shards.append(len(requests))
            yield number, SimpleNamespace(each=lambda: [None] * self.shards[-1])


@pytest.mark.parametrize(
    ("prompts", "engines", "shard_size", "expected"),
    [
        (6, 1, 64, [6]),
        (6, 2, 64, [3, 3]),
        (6, 4, 64, [2, 2, 2]),
        (6, 2, 2, [2, 2, 2]),
        (1, 2, 64, [1]),
    ],
)
def test_every_engine_has_work_as_far_as_there_are_prompts(
    prompts: int, engines: int, shard_size: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are whole prompts, and none is larger than ``shard_size``."""
    rows = [{"prompt_ids": [1, 2, number]} for number in range(prompts)]
    generation = GenerationConfig(num_generations=SAMPLES, shard_size=shard_size, max_completion_length=4)
    spreading = Engines(engines)
    draws = PromptSchedule(rows, generation, seed=0)
    sampling = Sampling(spreading, None, draws, SimpleNamespace(), (0,), None, "model", threading.Event())  # type: ignore[arg-type]
    monkeypatch.setattr("alignment_core.environments.episode.Episode.append_turn", lambda *_: None)
    monkeypatch.setattr(Sampling, "rollouts", lambda _, episodes: episodes)
    sampling.complete(range(prompts), version=0)
    assert spreading.shards == [SAMPLES * prompts_of_shard for prompts_of_shard in expected]
