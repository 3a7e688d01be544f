"""The death of one of an engine's workers. (That they hold the policy is in `make test`.)"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.recipes import ResourcesConfig
from tests.stages.test_rl_parallel_engines import parallel, resources, run_in_parallel

__all__ = ["parallel", "resources"]

pytestmark = pytest.mark.slow


class WorkerKiller:
    """A reporter that kills a worker of the engine, once, after the first step."""

    def __init__(self, machines: Any) -> None:
        self.machines, self.killed = machines, False

    def __call__(self, done: float, *_: Any) -> None:
        if done == 1 and not self.killed:
            group = self.machines.actors.engines
            engine = group.ray.get(group.actors[0].__ray_call__.remote(lambda _: os.getpid()))
            workers = [child for child in psutil.Process(engine).children() if "Worker_TP" in " ".join(child.cmdline())]
            assert len(workers) == 2
            os.kill(workers[-1].pid, signal.SIGKILL)
            self.killed = True


def test_the_death_of_a_worker_costs_no_step(
    parallel: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    result = run_in_parallel(parallel, resources, tiny_model(), tmp_path, WorkerKiller(parallel))
    assert result.cost["restarts"] == 1
