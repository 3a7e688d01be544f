"""An engine of several workers, each with a part of every weight, follows the policy as one worker does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.recipes import ResourcesConfig
from tests.stages.rl_runs import RESOURCES, run_rl, section_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def resources() -> ResourcesConfig:
    return RESOURCES.model_copy(update={"trainers": 1, "zero_stage": 0, "tensor_parallel_size": 2})


@pytest.fixture
def parallel(machines: Any, resources: ResourcesConfig) -> Iterator[Any]:
    """Machines of their own, over the Ray of the others."""
    others = machines(1)
    one = type(others)(resources, others.temporary)
    yield one
    one._end_actors()


class WorkerKiller:
    """A reporter that kills a worker of the engine, once, after the first step."""

    def __init__(self, machines: Any) -> None:
        self.machines, self.killed = machines, False

    def __call__(self, done: float, *_: Any) -> None:
        if done == 1 and not self.killed:
            group = self.machines._engines
            engine = group.ray.get(group.actors[0].__ray_call__.remote(lambda _: os.getpid()))
            workers = [one for one in psutil.Process(engine).children() if "Worker_TP" in " ".join(one.cmdline())]
            assert len(workers) == 2
            os.kill(workers[-1].pid, signal.SIGKILL)
            self.killed = True


def test_two_workers_hold_the_policy_and_the_death_of_one_costs_no_step(
    parallel: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text("def small(prompt, completion, _): return len(completion.lower()) / 10")
    section = section_of(
        STEPS,
        {"verifier": f"{tmp_path / 'letters.py'}:small"},
        {"max_completion_length": 6},
        {"learning_rate": 1e-2, "adam_epsilon": 1e-5},
        mismatch={"stop_above": 1e-6},  # what another policy passes by far
    )
    made, result = run_rl(
        tmp_path / "run", tiny_model(), section, lambda _: parallel, resources, WorkerKiller(parallel)
    )
    assert result.cost["restarts"] == 1
    assert [len(rows) for rows in steps_of(made)] == [12] * STEPS
