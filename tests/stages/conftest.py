"""Shared fixtures of the tests of the rl stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.execution.base import StageResult
from alignment_core.recipes import ResourcesConfig
from tests.stages.rl_runs import RESOURCES, Section, run_rl

RunRl = Callable[..., tuple[dict[str, Path], StageResult]]


@pytest.fixture
def resources() -> ResourcesConfig:
    """The default resources of runs; a file of tests may override them."""
    return RESOURCES


@pytest.fixture
def run(machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path) -> RunRl:
    """:func:`run_rl` for a section of a recipe, in the folder ``name``, on the tiny model unless another one is given."""

    def run(section: Section, name: str = "run", model: Path | None = None, resources=resources, **more: Any):
        return run_rl(tmp_path / name, model or tiny_model(), section, machines, resources, **more)

    return run


@pytest.fixture
def actors(machines: Any) -> Callable[[], dict[str, list[int]]]:
    """The processes of the running trainers and engines, by role."""

    def find() -> dict[str, list[int]]:
        groups = {"trainers": machines(2).actors.trainers, "engines": machines(2).actors.engines}
        calls = {
            name: [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in group.actors]
            for name, group in groups.items()
            if group
        }
        return {name: machines(2).actors.ray.get(pids) for name, pids in calls.items()}

    return find
