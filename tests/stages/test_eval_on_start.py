"""Held-out rows before the first step: measured once, as plain transformers does, and without influence on the result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from alignment_core.artifacts import Store, open_store
from alignment_core.artifacts.attachments import attachment
from alignment_core.evaluation.files import HELD_OUT
from alignment_core.execution import training_loop
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.curve import CURVE, Curve
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.host.progress_log import headline, number
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.stages import dpo, reward_model, sft
from tests.stages.killing import Killer
from tests.stages.test_continued_pretraining import blocks, loss_of

pytestmark = pytest.mark.slow


class Recorder(Killer):
    """Kills a trainer when ``at`` steps are done and measured, and keeps the steps whose reports have held-out metrics."""

    def __init__(self, machines: Any, group: str, at: int) -> None:
        super().__init__(machines, group, at)
        self.tested: list[float] = []

    def __call__(self, done: float, total: float | None, unit: str, metrics: Any) -> None:
        tested = any(name.startswith("test_") for name in metrics)
        self.tested += [done] if tested else []
        if done or tested:  # the first report comes before the evaluation
            super().__call__(done, total, unit, metrics)


@pytest.fixture
def run(machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run("sft", model, train, test, kill_at=2, eval_on_start=False)``: the store, the result, the tested steps."""
    monkeypatch.setattr(training_loop, "REPORT_SECONDS", 0.0)
    resources = ResourcesConfig(max_tokens_per_microbatch=96, progress_seconds=1e-9, wait_timeout_seconds=120)

    def run_stage_on(
        stage: str, model: Path, train: pa.Table, test: pa.Table, kill_at: int = -1, config: Any = None, **training: Any
    ) -> tuple[Store, StageResult, list[float]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        store, data = open_store(folder / "store"), folder / "data"
        data.mkdir(parents=True)
        pq.write_table(train, data / "train.parquet")
        pq.write_table(test, data / "test.parquet")
        inputs = {"model": store.publish(model, "model"), "data": store.publish(data, "dataset")}
        settings = {"training": {"batch_size": 6, "learning_rate": 1e-3, **training}, **(config or {})}
        call = StageCall(stage=stage, label=stage, config=settings, inputs=inputs)
        recorder = Recorder(machines(2), "trainers", kill_at)
        result = run_stage(StageRequest(store, call, machines(2), resources, recorder))
        return store, result, recorder.tested

    return run_stage_on


def test_the_loss_at_step_0_is_the_cross_entropy_of_transformers_on_completion_tokens(
    run: Any, tiny_model: Any
) -> None:
    train, test = blocks(18, seed=1), blocks(7, seed=2)
    store, result, tested = run("sft", tiny_model(), train, test)
    before, after = loss_of(tiny_model(), test), loss_of(store.fetch(result.reference), test)
    assert result.metrics["test_loss.first"] == pytest.approx(before, rel=1e-5)
    assert result.metrics["test_loss"] == pytest.approx(after, rel=1e-5)
    assert after < before
    assert tested == [0, 3]
    curve = Curve.from_bytes(attachment(store, result.reference, CURVE) or b"")
    series = [(line["step"], line["metrics"]["test_loss"]) for line in curve.lines if "test_loss" in line["metrics"]]
    assert dict(series) == pytest.approx({0: before, 3: after}, rel=1e-5)
    assert f"test loss {number(before)} → {number(after)}" in headline(sft.SHOWS, result.metrics)


def test_a_run_that_is_resumed_does_not_measure_the_start_again_and_ends_in_the_same_bytes(
    run: Any, tiny_model: Any
) -> None:
    arguments = ("sft", tiny_model(), blocks(18, seed=1), blocks(7, seed=2))
    _, whole, _ = run(*arguments)
    for kill_at in (0, 2):  # before the first checkpoint, and after one
        store, killed, tested = run(*arguments, kill_at=kill_at)
        curve = Curve.from_bytes(attachment(store, killed.reference, CURVE) or b"")
        assert [line["step"] for line in curve.lines if "test_loss" in line["metrics"]] == [0, 3]
        assert killed.cost["restarts"] == 1
        assert tested.count(0) == 1
        assert (killed.reference, killed.metrics["test_loss.first"]) == (
            whole.reference,
            whole.metrics["test_loss.first"],
        )
    _, without, tested = run(*arguments, eval_on_start=False)
    assert tested == [3]
    assert "test_loss.first" not in without.metrics
    assert without.reference == whole.reference
    assert without.metrics["test_loss"] == whole.metrics["test_loss"]
    assert without.key != whole.key
    assert "eval_on_start" not in TrainingConfig().model_dump(mode="json"), "so the default leaves keys as they were"


def pairs(rows: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    columns = {
        name: [random.integers(97, 123, random.integers(2, 20)).tolist() for _ in range(rows)]
        for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    }
    return pa.table({**columns, "margin": pa.nulls(rows, pa.float32())})


def test_a_reward_models_accuracy_at_step_0_is_that_of_its_scores_by_hand(
    run: Any, tiny_model: Any, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained(tmp_path / "judge")
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    test = pairs(11, seed=2)

    def score(ids: list[int]) -> float:
        with torch.no_grad():
            hidden = judge.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return float(hidden @ judge.score.weight[0].detach())

    margins = [
        score(row["prompt_ids"] + row["chosen_ids"]) - score(row["prompt_ids"] + row["rejected_ids"])
        for row in test.to_pylist()
    ]
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    assert 0 < accuracy < 1
    store, result, tested = run("reward_model", tmp_path / "judge", pairs(18, seed=1), test)
    assert tested == [0, 3]
    assert result.metrics["test_accuracy.first"] == pytest.approx(accuracy, rel=1e-5)
    loss = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)  # Bradley and Terry
    assert result.metrics["test_loss.first"] == pytest.approx(loss, rel=1e-4)
    shown = headline(reward_model.SHOWS, result.metrics)
    assert f"test accuracy {number(accuracy)} → {number(result.metrics['test_accuracy'])}" in shown
    beside = json.loads((store.fetch(result.reference) / HELD_OUT).read_text())
    after = {name: result.metrics[name] for name in ("test_accuracy", "test_loss", "test_margin")}
    assert beside == pytest.approx(after, rel=1e-5), "the model's files do not depend on the evaluation before"


def test_a_policy_that_is_its_own_reference_begins_at_ln_2(run: Any, tiny_model: Any) -> None:
    config = {"loss": {"sync_ref_model": {"sync_steps": 2}}}
    _, result, _ = run("dpo", tiny_model(), pairs(18, seed=1), pairs(11, seed=2), config=config)
    first = {name: result.metrics[f"test_{name}.first"] for name in ("loss", "margin", "accuracy")}
    assert first == pytest.approx({"loss": math.log(2), "margin": 0, "accuracy": 0.5}, abs=1e-5), "ties count half"
    assert "test accuracy 0.500 → " in headline(dpo.SHOWS, result.metrics)
