"""Real stages whose actors die, hang, diverge, or run out of memory: errors, kept progress, and final results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import DeadlineExceeded, NumericError
from alignment_core.execution import training_loop, training_stages
from alignment_core.execution.base import Stage, StageCall, StageResult
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import GenerationConfig, ResourcesConfig, TrainingConfig
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.sft import SftStageConfig
from alignment_core.training.checkpoints import newest_progress
from alignment_core.training.methods.sft import Sft
from alignment_core.training.ranks import open_job
from alignment_core.training.resumable import resume
from alignment_core.training.trainer import Trainer, TrainJob
from tests.execution.greedy import Greedy
from tests.stages.calls import offer
from tests.stages.killing import Killer, store_with

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "REPORT_SECONDS", 0.0)


@pytest.fixture
def resources() -> ResourcesConfig:
    """A checkpoint after every step."""
    return ResourcesConfig(
        device="cpu", engines=1, kv_cache_mib=16, zero_stage=1, progress_seconds=1e-9, wait_timeout_seconds=120
    )


def demonstrations() -> pa.Table:
    """14 rows of 4 to 59 tokens: in batches of 6, 3 steps an epoch."""
    random = np.random.default_rng(5)
    ids = [random.integers(0, 256, random.integers(4, 60)).tolist() for _ in range(14)]
    sources = [f"rows.jsonl:{number}" for number in range(1, 15)]
    return pa.table({"input_ids": ids, "loss_mask": [[1] * len(row) for row in ids], "source": sources})


def sft_call(model: Reference, data: Reference, stage: str = "sft", **training: Any) -> StageCall:
    settings = {"batch_size": 6, "num_train_epochs": 2, "learning_rate": 1e-3, **training}
    config = SftStageConfig(training=TrainingConfig(**settings)).model_dump(mode="json")
    return StageCall(stage=stage, label="policy", config=config, inputs={"model": model, "data": data})


def test_training_survives_the_death_of_a_rank_and_ends_in_the_same_digest(
    machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    def run(name: str, kill_at: int) -> tuple[StageResult, list[float]]:
        store, model, data = store_with(tmp_path / name, tiny_model(), demonstrations())
        killer = Killer(machines(2), "trainers", kill_at)
        return run_stage(StageRequest(store, sft_call(model, data), machines(2), resources, killer)), killer.done

    whole, steps = run("whole", kill_at=-1)
    assert (steps, "restarts" in whole.cost) == ([0, 1, 2, 3, 4, 5, 6], False)
    killed, steps = run("killed", kill_at=3)
    assert killed.cost["restarts"] == 1
    assert steps == [0, 1, 2, 3, 3, 4, 5, 6], "it resumed from the checkpoint after step 3"
    assert killed.reference == whole.reference


@pytest.mark.exhaustive
def test_generation_survives_the_death_of_an_engine_and_keeps_its_finished_shards(
    machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    rows = pa.table(
        {
            "prompt_ids": [tokenizer(f"{number}+{number}=")["input_ids"] for number in range(8)],
            "prompt": [f"{number}+{number}=" for number in range(8)],
            "label": pa.nulls(8, pa.string()),
            "task": pa.nulls(8, pa.string()),
            "source": [f"rows.jsonl:{number}" for number in range(8)],
        }
    )
    generation = GenerationConfig(num_generations=2, max_completion_length=8, shard_size=2)
    config = GenerateConfig(generation=generation).model_dump(mode="json")

    def run(name: str, kill_at: int) -> tuple[StageResult, list[float]]:
        store, model, data = store_with(tmp_path / name, tiny_model(), rows)
        call = StageCall(stage="generate", label="samples", config=config, inputs={"policy": model, "prompts": data})
        killer = Killer(machines(2), "engines", kill_at)
        return run_stage(StageRequest(store, call, machines(2), resources, killer)), killer.done

    whole, _ = run("whole", kill_at=-1)
    killed, shards = run("killed", kill_at=2)
    assert killed.cost["restarts"] == 1
    assert sorted({*shards}) == [0, 1, 2, 3, 4]
    assert len(shards) == 6, "the shard that it resumed from is reported twice"
    assert shards == sorted(shards), "none was sampled again"
    assert killed.reference == whole.reference


def test_a_collective_that_waits_for_a_peer_ends_at_its_deadline_and_names_the_call(
    machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    pq.write_table(demonstrations(), tmp_path / "train.parquet")
    job = TrainJob(
        Sft(),
        Model(tiny_model(), Reference("model", "0" * 64)),
        None,
        tmp_path / "train.parquet",
        None,
        TrainingConfig(),
        seed=1,
    )
    says = r"^1 of 2 trainers did not answer `train` within 3 seconds \(resources\.wait_timeout_seconds\)$"

    def train_on_one_rank_of_two() -> None:
        with machines(2).trainers() as trainers:
            ranks = open_job(trainers, job, resources)
            resume([ranks], tmp_path)
            ranks.one_within(3, 0, Trainer.train, 1, 0.0)  # rank 1 is not called, so rank 0 waits for its gradients

    with pytest.raises(DeadlineExceeded, match=says):
        train_on_one_rank_of_two()


def test_a_diverging_stage_names_all_rows_keeps_its_checkpoint_and_publishes_nothing(
    machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path
) -> None:
    store, model, data = store_with(tmp_path, tiny_model(), demonstrations())
    call, attempts = sft_call(model, data, learning_rate=1e30), []
    with pytest.raises(NumericError) as caught:
        run_stage(StageRequest(store, call, machines(1), resources, lambda done, *_: attempts.append(done)))
    assert attempts == [0, 1], "it is not tried again"
    (progress,) = store.workspace.all_progress.iterdir()
    assert newest_progress(progress) == progress / "step-00000001"
    assert [folder.name for folder in progress.glob("step-*")] == ["step-00000001"], "nothing later was saved"
    assert {manifest.reference for manifest in store.artifacts()} == {model, data}
    message = str(caught.value)
    assert f"at step 1 of {STEPS}" in message
    assert f"the last good checkpoint is {progress / 'step-00000001'}" in message
    assert len(re.findall(r"\d+ \(rows\.jsonl:\d+\)", message)) == 6

    exploding = sft_call(model, data, max_loss=0.001)
    with pytest.raises(NumericError, match=r"the loss is 5\.\d+, above training\.max_loss 0\.001, at step 0") as caught:
        run_stage(StageRequest(store, exploding, machines(1), resources, lambda *_: None))
    assert "no checkpoint had been written yet" in str(caught.value)


def test_a_batch_too_large_for_memory_is_split_further_and_trains_the_same(
    machines: Any, resources: ResourcesConfig, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lambda context, config: training_stages.train(context, Greedy(), config.training)  # noqa: E731
    offer(monkeypatch, Stage("greedy", 1, {"model": "model"}, SftStageConfig, run))
    store, model, data = store_with(tmp_path, tiny_model(), demonstrations())
    lavish = resources.model_copy(update={"max_tokens_per_microbatch": 128})
    result = run_stage(StageRequest(store, sft_call(model, data, stage="greedy"), machines(1), lavish, lambda *_: None))
    assert result.cost["tokens_per_microbatch"] == 64
    assert result.metrics["steps"] == STEPS
