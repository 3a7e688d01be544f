"""An RL run that is stopped between the update of the policy and the engines' taking its weights."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import Stopped
from alignment_core.execution.base import StageContext
from alignment_core.execution.curve import Curve
from alignment_core.recipes import TrainingConfig
from alignment_core.stages.rl.loop import Loop
from alignment_core.training.checkpoints import CURVE, folder_of

STEPS = 3


class _Best:
    def resume(self, state: Any, evaluated: int) -> None: ...


class _Loop(Loop):
    """A loop whose steps and evaluations cost nothing, and which is stopped while the engines take the weights of step 2."""

    def __init__(self, progress: Path, start: int, stops: bool, quietly: bool = False) -> None:
        """``quietly``: the engines take the weights to the end, and the stop is only seen in the report that follows."""
        self.context = StageContext.__new__(StageContext)
        self.context.__dict__.update(
            curve=Curve(),
            progress=progress,
            inputs={"policy": progress},
            references={"policy": Reference("model", "0" * 64)},
            outputs={"policy": progress},
            stopping=threading.Event(),
            resumed=lambda lines: None,
            reporter=lambda *_: None,
            resources=SimpleNamespace(progress_seconds=1e9),
        )
        self.section = SimpleNamespace(steps=STEPS, training=TrainingConfig())  # type: ignore[assignment]
        group = SimpleNamespace(all=lambda *_: [{"step": start, "driver": {}, "parameters": 1}])
        self.ranks = SimpleNamespace(groups=[group], rests=False, wake=lambda: 0)  # type: ignore[assignment]
        self.sampler = self.trajectories = SimpleNamespace(close=lambda: 0, settle=lambda: 0)  # type: ignore[assignment]
        self.best = _Best()  # type: ignore[assignment]
        self.stops = stops
        self.quietly = quietly
        self.shows = ()

    def _step(self, step: int) -> dict[str, float]:
        return {"reward": float(step), "reward_deviation": 1.0}

    def _evaluates(self, step: int) -> bool:
        return step > 0

    def _sync_weights(self, step: int, evaluates: bool) -> dict[str, float]:
        if self.stops and step == 2:
            self.context.stopping.set()
            if not self.quietly:
                raise Stopped("stopped")
        return {"held_out_reward": 10.0 * step} if evaluates else {}

    def _save(self, step: int, state: dict[str, Any]) -> None:
        folder_of(self.context.progress, step).mkdir(parents=True)
        (folder_of(self.context.progress, step) / CURVE).write_bytes(self.context.curve.to_bytes())

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: dict[str, Any]) -> None: ...

    def _export(self) -> None: ...

    def _warnings(self, rewards_differ: bool) -> list[str]:
        return []


@pytest.mark.parametrize("quietly", [False, True])
def test_a_run_that_is_stopped_before_the_engines_have_the_weights_keeps_all_metrics_of_its_step(
    quietly: bool, tmp_path: Path
) -> None:
    """The checkpoint holds the step's update. Its rewards were measured before the stop, its held-out reward after the resume:
    the curve is that of an uninterrupted run."""
    with pytest.raises(Stopped):
        _Loop(tmp_path, 0, stops=True, quietly=quietly).run()
    resumed = _Loop(tmp_path, 2, stops=False)
    resumed.run()
    points = [
        (line["step"], line["metrics"]["reward"], line["metrics"]["held_out_reward"])
        for line in resumed.context.curve.lines
    ]
    assert points == [(1, 0.0, 10.0), (2, 1.0, 20.0), (3, 2.0, 30.0)]


def test_a_run_that_is_stopped_after_its_last_step_has_the_metrics_of_that_step(tmp_path: Path) -> None:
    loop = _Loop(tmp_path, 0, stops=False)
    loop.run()
    loop._save(STEPS, {})
    metrics = _Loop(tmp_path, STEPS, stops=False).run()
    assert (metrics["reward"], metrics["held_out_reward"]) == (2.0, 30.0)
