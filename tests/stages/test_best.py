"""The best policy of a run is whole or absent, and a killed run always finds the one that its checkpoint names."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.stages.rl.best import Best
from alignment_core.stages.rl.loop import Loop
from alignment_core.training.checkpoints import complete, folder_of


@pytest.fixture
def best(tmp_path: Path) -> Best:
    return opened(tmp_path)


def opened(progress: Path) -> Best:
    section = RlConfig.model_validate(
        {"prompts": "none.jsonl", "rewards": [{"verifier": "task"}], "best": {"prompts": "none.jsonl"}}
    )
    assert section.best is not None
    context: Any = SimpleNamespace(
        progress=progress, derive=lambda _: 0
    )  # the only part of a stage that is needed here
    return Best(context, section, section.best, [])


def export(directory: Path) -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_text(str(directory))


def killed_while_it_exports(directory: Path) -> None:
    export(directory)
    raise KeyboardInterrupt


def kept(progress: Path) -> list[str]:
    return sorted(folder.name for folder in progress.iterdir())


def test_a_better_policy_replaces_the_best_once_whole_and_checkpointed(best: Best, tmp_path: Path) -> None:
    best.resume(None)
    best.keep(10, 0.5, export)
    best.checkpointed()
    with pytest.raises(KeyboardInterrupt):
        best.keep(20, 0.6, killed_while_it_exports)
    assert best.state == {"step": 10, "reward": 0.5}
    assert kept(tmp_path) == ["best-00000010", "best-00000020.partial"]

    best.keep(30, 0.7, export)
    assert kept(tmp_path) == ["best-00000010", "best-00000030"], "a run killed now resumes with the policy of step 10"
    best.keep(40, 0.8, export)
    assert kept(tmp_path) == ["best-00000010", "best-00000040"]
    best.checkpointed()
    assert kept(tmp_path) == ["best-00000040"]


def test_a_resumed_run_deletes_policies_that_its_checkpoint_does_not_name(best: Best, tmp_path: Path) -> None:
    best.keep(10, 0.5, export)
    best.checkpointed()
    best.keep(20, 0.6, export)
    with pytest.raises(KeyboardInterrupt):
        best.keep(30, 0.7, killed_while_it_exports)

    again = opened(tmp_path)
    again.resume({"step": 10, "reward": 0.5})
    assert kept(tmp_path) == ["best-00000010"]
    again.resume(None)
    assert kept(tmp_path) == []


def test_a_run_that_is_stopped_again_before_its_next_step_keeps_the_policy_that_its_checkpoint_names(
    best: Best, tmp_path: Path
) -> None:
    """It was stopped while it evaluated step 20, resumed, and found step 20 to be better; then it is stopped in step 20. The
    checkpoint of that step is there and stays: it names step 10."""
    layout = {"world": 1}
    checkpoint = folder_of(tmp_path, 20)
    checkpoint.mkdir()
    complete(checkpoint, {"step": 20, "layout": layout, "driver": {"best": {"step": 10, "reward": 0.5}}})
    best.keep(10, 0.5, export)
    best.resume({"step": 10, "reward": 0.5}, 10)
    best.keep(20, 0.6, export)

    loop: Any = object.__new__(Loop)
    loop.best = best
    loop.context = SimpleNamespace(progress=tmp_path, curve=SimpleNamespace(to_bytes=bytes))
    loop.ranks = SimpleNamespace(groups=[SimpleNamespace(all=lambda _: [{"step": 20, "layout": layout}])])
    loop.schedule = SimpleNamespace(saving=nullcontext)
    loop.trajectories = SimpleNamespace(settle=lambda: None)
    loop.window = SimpleNamespace(save=lambda: None)
    loop._save(20, {"best": best.state})
    assert kept(tmp_path) == ["best-00000010", "best-00000020", "step-00000020"]
