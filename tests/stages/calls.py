"""Shared by tests of stages: a call to modify, machines without actors, and a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from alignment_core import plugins
from alignment_core.artifacts import Reference, Store
from alignment_core.execution.base import STAGES, Stage, StageCall, StageResult
from alignment_core.execution.key import StageKey
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.execution.warm_actors import WarmActors
from alignment_core.recipes import ResourcesConfig

ROOT = Path(__file__).parents[2]


class HostAlone(WarmMachines):
    """Machines of a host whose stages need no actors: it starts no Ray, not even to describe its hardware."""

    def __init__(self) -> None:
        super().__init__(ResourcesConfig(), Path("nowhere"))
        self.actors = NoActors(ResourcesConfig(), Path("nowhere"))


class NoActors(WarmActors):
    """Of a host that starts no Ray."""

    def on_device(self, resources: ResourcesConfig) -> ResourcesConfig:
        return resources.on("cpu")

    def hardware(self, resources: ResourcesConfig | None = None) -> dict[str, Any]:
        return {}


def run_alone(store: Store, call: StageCall, key: StageKey | None = None, **resources: Any) -> StageResult:
    """Run a stage that needs no actors."""
    return run_stage(StageRequest(store, call, HostAlone(), ResourcesConfig(**resources), lambda *_: None, key=key))


def offer(monkeypatch: pytest.MonkeyPatch, stage: Stage[Any]) -> None:
    """Register a stage by name, like one with its own module."""
    module = ModuleType(f"alignment_core.stages.{stage.name}")
    module.STAGE = stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(plugins._targets(STAGES), stage.name, [f"{module.__name__}:STAGE"])


def reference(kind: str, digit: str) -> Reference:
    return Reference(kind, digit * 64)


def call(**changed: Any) -> StageCall:
    fields = {
        "stage": "sft",
        "label": "sft",
        "config": {"training": {"learning_rate": 1e-4, "batch_size": 8}},
        "inputs": {"model": reference("model", "1"), "data": reference("dataset", "2")},
        "seed": 3,
    }
    return StageCall.model_validate(fields | changed)


def python(code: str, **environment: str) -> Any:
    """The JSON output of ``code``, run by a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
