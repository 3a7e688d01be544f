"""The shapes of models whose engines `make test` does not ask: new weights reach them as they reach the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.inference.test_engine_parity import (
    engine,
    test_adapters_reach_the_engine_merged_into_their_weights,
    test_new_weights_in_a_running_engine_give_their_own_log_probabilities,
    test_weights_that_come_in_buckets_are_those_of_the_checkpoint,
    warm_engine,
)

__all__ = [
    "engine",
    "test_adapters_reach_the_engine_merged_into_their_weights",
    "test_new_weights_in_a_running_engine_give_their_own_log_probabilities",
    "test_weights_that_come_in_buckets_are_those_of_the_checkpoint",
    "warm_engine",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[("llama", False), ("qwen2", True)], ids=["llama, untied", "qwen2, tied"])
def models(request: pytest.FixtureRequest, tiny_model: Any) -> dict[str, Path]:
    """Two models of one architecture."""
    return {"a": tiny_model(*request.param, seed=1), "b": tiny_model(*request.param, seed=2)}
