"""An engine of several workers, each with a part of every weight, follows the policy as one worker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment_core.execution.base import StageResult
from alignment_core.recipes import ResourcesConfig
from tests.stages.rl_runs import RESOURCES, run_rl, section_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def resources() -> ResourcesConfig:
    return RESOURCES.model_copy(update={"trainers": 1, "zero_stage": 0, "tensor_parallel_size": 2})


@pytest.fixture
def parallel(machines: Any, resources: ResourcesConfig) -> Iterator[Any]:
    """Separate machines, over the same Ray."""
    others = machines(1)
    single = type(others)(resources, others.actors.temporary)
    yield single
    single.actors.end_actors()


def run_in_parallel(
    parallel: Any, resources: ResourcesConfig, model: Path, folder: Path, reporter: Callable[..., None] | None = None
) -> StageResult:
    """A short run, of which each step has all its completions, and an engine that follows the policy."""
    (folder / "letters.py").write_text("def small(prompt, completion, _): return len(completion.lower()) / 10")
    section = section_of(
        STEPS,
        {"verifier": f"{folder / 'letters.py'}:small"},
        {"max_completion_length": 6},
        {"learning_rate": 1e-2, "adam_epsilon": 1e-5},
        importance_sampling_correction={"stop_above": 1e-6},  # which another policy exceeds by far
    )
    outputs, result = run_rl(folder / "run", model, section, lambda _: parallel, resources, reporter)
    assert [len(rows) for rows in steps_of(outputs)] == [12] * STEPS
    return result


@pytest.mark.exhaustive
def test_two_workers_hold_the_policy(
    parallel: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    """`make test-long` kills one of them."""
    assert "restarts" not in run_in_parallel(parallel, resources, tiny_model(), tmp_path).cost
