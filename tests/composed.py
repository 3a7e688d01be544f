"""Compositions that run their stages in this process, without Prefect."""

from __future__ import annotations

from typing import Any

from alignment_core.artifacts import Store
from alignment_core.composition.graph import StageSpec
from alignment_core.execution.base import Reporter, StageCall, StageResult
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig


class Runs:
    """A composition that runs each stage when it is submitted."""

    def __init__(self, store: Store, machines: Any, reporter: Reporter = lambda *_: None) -> None:
        self.store, self.machines, self.seed = store, machines, 5
        self.reporter = reporter
        self.training_data: dict[str, Any] = {}
        self.trust_remote_code = False
        self.results: dict[str, StageResult] = {}

    def submit(self, spec: StageSpec) -> Any:
        settings: dict[str, Any] = {"config": spec.config.model_dump(mode="json"), "inputs": spec.inputs}
        settings |= {"stream": spec.stream, "needs": spec.needs}
        call = StageCall(stage=spec.stage, label=spec.label, seed=self.seed, **settings)
        request = StageRequest(self.store, call, self.machines, ResourcesConfig(), self.reporter)
        self.results[spec.label] = run_stage(request)
        return self.results[spec.label].reference
