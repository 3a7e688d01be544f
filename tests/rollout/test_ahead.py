"""Which draws a step takes that samples ahead of training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from alignment_core.rollout.ahead import Ahead


def test_completions_that_can_wait_no_longer_are_taken_alone_when_they_are_more_than_a_step_takes() -> None:
    # No engine: in what order completions are done decides which draws grow old, and is the engine's chance.
    sampling: Any = SimpleNamespace(
        engines=SimpleNamespace(size=1), environments=None, draws=None, wait=1.0, check=lambda: None
    )
    ahead = Ahead(sampling, lambda rows: rows, prompts_per_step=2, steps=9, max_staleness=2, partial=True)
    ahead.version = 2
    ahead._began = {0: 0, 1: 0, 2: 0, 5: 1, 6: 1, 7: 2}
    ahead._ready = {draw: [{"group": draw}] for draw in ahead._began}
    assert [row["group"] for row in ahead.take(2)] == [0, 1, 2], "all that is due, and nothing else"
    assert [row["group"] for row in ahead.take(2)] == [5, 6], "then the earliest"
    assert ahead.state == {"drawn": 0, "pending": [7]}
