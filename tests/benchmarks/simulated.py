"""Engines and trainers that answer at once, with data of the right size: what is left is the work of the driver."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.inference.completions import Completion, Completions, Request
from alignment_core.inference.decoding import Decoding
from alignment_core.training.policy_trainer import RlJob
from alignment_core.training.step_data import StepData
from alignment_core.training.step_report import StepReport

ENGINE = f"{__name__}:SimulatedEngine"
IMPORTS = f"{__name__}:nothing"
COLUMNS = ("old_logps", "reference_logps", "old_values")


def nothing() -> None:
    """In place of the imports of trainers and engines."""


class SimulatedEngine:
    """As :class:`alignment_core.inference.engine.Engine`, with random tokens. It decodes them as that one does."""

    def __init__(self, request: Any, resources: Any, device: Any) -> None:
        self._vocabulary = request.policy.tokenizer().vocab_size

    def sample(
        self, policy: str, requests: Sequence[Request], config: Any, stop_ids: Sequence[int], decoding: Decoding | None
    ) -> Completions:
        """Completions of the greatest length."""
        return Completions.of([self._completion(request).decoded(decoding) for request in requests])

    def _completion(self, request: Request) -> Completion:
        tokens = request.max_tokens
        ids = np.random.default_rng(request.seed).integers(1000, self._vocabulary, tokens, np.int32)
        return Completion(ids, np.full(tokens, -1.5, np.float32), np.zeros(tokens, np.int32), "length")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "is_lost":
            raise AttributeError(name)
        return self._done

    def _done(self, *_: Any, **_options: Any) -> list[Any]:
        """Every other method."""
        return []


class SimulatedTrainer:
    """As :class:`alignment_core.training.policy_trainer.PolicyTrainer`."""

    def __init__(self, job: RlJob) -> None:
        self._policy = job.policy.path
        self._step = 0
        self._batch: StepData

    def layout(self) -> dict[str, Any]:
        """Of no checkpoint."""
        return {}

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """The first step."""
        return {"step": 0, "driver": {}, "parameters": 0}

    def load(self, batch: StepData, critic_units: tuple[float, float]) -> None:
        """Keep the batch, as ranks do."""
        self._batch = batch

    def forward(self, old: bool, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """Numbers for all trained tokens."""
        return {name: np.full(int(self._batch.targets_N.sum()), -1.5, np.float32) for name in wanted}

    def update(self, numbers: Mapping[str, np.ndarray], *_: Any) -> dict[str, StepReport]:
        """A report of one step."""
        assert {len(column) for column in numbers.values()} == {int(self._batch.targets_N.sum())}
        return {"policy": StepReport(sums={"loss": 0.0, "kl": 0.0, "trained_tokens": 1.0}, normaliser=1.0, steps=1)}

    def export(self, name: str, directory: Path, *_: Any) -> None:
        """The policy as it was."""
        shutil.copytree(self._policy, directory, dirs_exist_ok=True)

    def end_step(self, *_: Any) -> None:
        """Nothing."""

    empty_cache = rest = wake = open_channel = send_weights = end_step


class SimulatedJob(RlJob):
    """The job of ranks that compute nothing."""

    def open(self, resources: Any, device: Any, rank: int, world: int) -> Any:
        """The object of one rank."""
        return SimulatedTrainer(self)
