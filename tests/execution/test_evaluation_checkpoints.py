"""Evaluations on held-out rows during training: schedule, best checkpoint, early stopping, and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from alignment_core.artifacts.reference import Reference
from alignment_core.errors import UserError
from alignment_core.execution import training_loop
from alignment_core.execution.base import StageResult
from alignment_core.execution.evaluation_checkpoints import EvaluationCheckpoints
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from tests.execution.test_failures import demonstrations, sft_call
from tests.stages.killing import Killer, store_with

TRAINED = Model(Path("trained"), Reference("model", "0" * 64))


def looks(progress: Path, step: int = 0, **training: Any) -> EvaluationCheckpoints:
    fields = {"eval_steps": 2, "metric_for_best_model": "loss", **training}
    return EvaluationCheckpoints(progress, TrainingConfig(**fields), step, total=9)


def take(looks: EvaluationCheckpoints, step: int, **metrics: float) -> None:
    def export(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(step))

    looks.add(step, metrics, export)


def result(looks: EvaluationCheckpoints, folder: Path) -> str:
    looks.link_best(folder, TRAINED)
    return (folder / "weights").read_text()


def test_evaluations_are_due_every_eval_steps_and_at_the_end(tmp_path: Path) -> None:
    checkpoints = looks(tmp_path)
    assert [step for step in range(10) if checkpoints.is_due(step)] == [2, 4, 6, 8, 9]
    assert [checkpoints.next_after(step) for step in (0, 1, 2, 8)] == [2, 2, 4, 9]
    take(checkpoints, 2, loss=1.0)
    assert not checkpoints.is_due(2)
    never = looks(tmp_path, eval_steps=None, metric_for_best_model=None)
    assert (never.is_due(9), never.next_after(0), never.best, never.stop) == (False, 9, None, False)


def test_an_evaluation_before_the_first_step_is_no_candidate(tmp_path: Path) -> None:
    checkpoints = EvaluationCheckpoints(
        tmp_path, TrainingConfig(eval_steps=2, metric_for_best_model="loss"), 0, 9, on_start=True
    )
    assert checkpoints.is_due(0)
    take(checkpoints, 0, loss=0.1)
    assert (checkpoints.is_due(0), checkpoints.best, checkpoints.stop) == (False, None, False)
    take(checkpoints, 2, loss=1.0)
    assert checkpoints.best == 2
    assert list(looks(tmp_path, step=3).metrics) == [0, 2]


@pytest.mark.parametrize(("name", "best"), [("loss", 4), ("nll", 6), ("accuracy", 2), ("margin", 8)])
def test_the_best_has_the_lowest_loss_or_highest_other_metric_and_the_earliest_wins_ties(
    name: str, best: int, tmp_path: Path
) -> None:
    checkpoints = looks(tmp_path, metric_for_best_model=name)
    measured = {
        2: {"loss": 3.0, "nll": float("nan"), "accuracy": 0.5, "margin": 0.0},
        4: {"loss": 2.0, "nll": 2.0, "accuracy": 0.5, "margin": 1.0},
        6: {"loss": 2.0, "nll": 1.0, "accuracy": 0.4, "margin": 2.0},
        8: {"loss": 4.0, "nll": 1.0, "accuracy": 0.3, "margin": 3.0},
    }
    for step, metrics in measured.items():
        take(checkpoints, step, **metrics)
    assert checkpoints.best == best
    assert result(checkpoints, tmp_path / "result") == str(best)


def test_training_stops_once_patience_is_exhausted(tmp_path: Path) -> None:
    checkpoints = looks(tmp_path, early_stopping_patience=2)
    stopped = []
    for step, loss in zip((2, 4, 6, 8), (3.0, 3.0, 2.0, 2.5), strict=True):
        take(checkpoints, step, loss=loss)
        stopped.append(checkpoints.stop)
    assert stopped == [False, False, False, False]
    take(checkpoints, 9, loss=2.0)
    assert checkpoints.stop


def test_a_restart_drops_later_evaluations_and_keeps_the_best_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = looks(tmp_path)
    take(checkpoints, 2, loss=2.0)
    take(checkpoints, 4, loss=3.0)
    checkpoints.checkpointed()  # after step 4 or 5
    take(checkpoints, 6, loss=1.0)
    again = looks(tmp_path, step=5)
    assert (list(again.metrics), again.best, result(again, tmp_path / "result")) == ([2, 4], 2, "2")
    take(again, 6, loss=1.0)
    again.checkpointed()
    assert [folder.name for folder in tmp_path.glob("best-*")] == ["best-00000006"]


def test_an_unmeasured_metric_is_refused_with_a_list_of_measured_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metric_for_best_model: 'los' is not measured .*; there are accuracy, loss"):
        take(looks(tmp_path, metric_for_best_model="los"), 2, loss=1.0, accuracy=0.5)


@pytest.fixture
def run(machines: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(training_loop, "REPORT_SECONDS", 0.0)
    resources = ResourcesConfig(device="cpu", engines=1, progress_seconds=1e-9, wait_timeout_seconds=120)

    def run_sft(name: str, kill_at: int = -1, **training: Any) -> tuple[StageResult, list[float], Any]:
        table = demonstrations()
        store, model, _ = store_with(tmp_path / name, tiny_model(), table)
        (folder := tmp_path / name / "both").mkdir()
        pq.write_table(table.slice(4), folder / "train.parquet")
        pq.write_table(table.slice(0, 4), folder / "test.parquet")
        killer = Killer(machines(2), "trainers", kill_at)
        call = sft_call(model, store.publish(folder, "dataset"), num_train_epochs=4, learning_rate=1e-2, **training)
        return run_stage(StageRequest(store, call, machines(2), resources, killer)), killer.done, store

    return run_sft


@pytest.mark.slow
def test_a_killed_run_that_keeps_the_best_ends_as_an_undisturbed_run(run: Any, tiny_model: Any) -> None:
    settings = {"eval_steps": 2, "metric_for_best_model": "loss"}
    whole, steps, store = run("whole", **settings)
    assert (steps[-1], whole.metrics["steps"]) == (8, 8)
    best = whole.metrics["best_step"]
    assert best < 8, "it learns four rows by heart and gets worse at others"
    assert set(whole.outputs) == {"model", "last"}
    last, _, _ = run("without")
    assert whole.outputs["last"] == last.reference
    assert whole.metrics["test_loss"] < last.metrics["test_loss"]
    assert json.loads((store.fetch(whole.reference) / "config.json").read_text())["model_type"] == "llama"
    killed, _, _ = run("killed", kill_at=best + 1, **settings)
    assert killed.cost["restarts"] == 1
    assert killed.outputs == whole.outputs
    early, steps, _ = run("early", early_stopping_patience=1, **settings)
    assert steps[-1] == early.metrics["steps"] == best + 2
    assert early.reference == whole.reference
    lora, _, store = run("lora", lora={"r": 2, "target_modules": ["q_proj"]}, **settings)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    beside = peft.PeftModel.from_pretrained(base, store.fetch(lora.outputs["adapter"])).merge_and_unload()
    whole = transformers.AutoModelForCausalLM.from_pretrained(store.fetch(lora.reference)).state_dict()
    for name, tensor in beside.state_dict().items():
        torch.testing.assert_close(tensor, whole[name])
    folders = [store.fetch(output) for output in lora.outputs.values()]
    assert not any((folder / "adapter").exists() for folder in folders)
    with pytest.raises(UserError, match=r"'accuracy' is not measured on held-out rows; there are loss"):
        run("other", eval_steps=2, metric_for_best_model="accuracy")
