"""Whole runs whose steps another process writes: after deaths and kills they have the trajectories of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.execution.base import StageCall
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import RlConfig
from alignment_core.rollout import trajectories
from alignment_core.rollout.trajectory_writer import TrajectoryWriter
from alignment_core.stages.rl import RlStageConfig
from tests.stages.conftest import RunRl
from tests.stages.killing import Killer, store_with
from tests.stages.rl_program import run_program
from tests.stages.rl_runs import RESOURCES, Section, prompts, rewards_small_letters, section_of

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return section_of(
        STEPS, rewards_small_letters(tmp_path), {"max_completion_length": 6}, trajectories={"keep": "all"}
    )


def test_each_attempt_at_a_run_has_a_process_that_writes_its_steps(
    section: Section, machines: Any, run: RunRl, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = run(section, "whole")
    writers: list[TrajectoryWriter] = []

    def writer() -> TrajectoryWriter:
        writers.append(TrajectoryWriter())
        return writers[-1]

    monkeypatch.setattr(trajectories, "SMALL", 0)
    monkeypatch.setattr(trajectories, "TrajectoryWriter", writer)
    killer = Killer(machines(2), "trainers", at=1)
    _, killed = run(section, "killed", reporter=killer)
    assert killer.done == [0, 1, 1, 2, 3]
    assert len(writers) == 2
    assert all(writer._process.returncode is not None for writer in writers)
    assert killed.outputs == whole.outputs


@pytest.mark.exhaustive
def test_a_run_that_is_killed_while_a_step_is_written_resumes_to_the_same_digests(
    section: Section, machines: Any, tiny_model: Any, tmp_path: Path, run: RunRl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process and the one beside it end by SIGKILL."""
    _, whole = run(section, "whole")
    store, policy, data = store_with(tmp_path / "killed", tiny_model(), prompts())
    config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
    call = StageCall(stage="rl", label="rl", config=config, inputs={"policy": policy, "prompts": data})
    assert run_program(store.uri, call, RESOURCES, killed_in=STEPS - 1) == [0, 1, 2]
    (folder,) = store.workspace.all_progress.glob("*/trajectories")
    files = {f"step-{step:06d}.{'partial' if step == STEPS - 1 else 'parquet'}" for step in range(STEPS)}
    assert {file.name for file in folder.iterdir()} == files

    monkeypatch.setattr(trajectories, "SMALL", 0)
    done: list[float] = []
    resumed = run_stage(StageRequest(store, call, machines(2), RESOURCES, lambda now, *_: done.append(now)))
    assert done == [2, 3]
    assert resumed.outputs == whole.outputs
