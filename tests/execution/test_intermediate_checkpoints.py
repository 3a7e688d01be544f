"""Models of earlier steps that a stage keeps as outputs: when, which, and after a crash."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pyarrow as pa
import pytest
import torch
import transformers

from alignment_core.artifacts.reference import Reference
from alignment_core.execution import training_loop
from alignment_core.execution.base import StageCall, StageResult, load_stage
from alignment_core.execution.intermediate_checkpoints import IntermediateCheckpoints
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.stages.reward_model import RewardModelStageConfig
from tests.execution.test_failures import demonstrations, sft_call
from tests.stages.killing import Killer, store_with

TRAINED = Model(Path("trained"), Reference("model", "0" * 64))


def checkpoints(progress: Path, step: int = 0, **training: Any) -> IntermediateCheckpoints:
    return IntermediateCheckpoints(progress, TrainingConfig(**{"save_steps": 2, **training}), step, total=8)


def keep(checkpoints: IntermediateCheckpoints, *steps: int) -> None:
    for step in steps:
        assert checkpoints.is_due(step)
        checkpoints.add(step, lambda folder: export(folder, "whole"))


def export(folder: Path, content: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text(content)


def outputs(checkpoints: IntermediateCheckpoints, folder: Path) -> list[str]:
    """The names of the outputs, in order."""

    def add_output(name: str) -> Path:
        names.append(name)
        (folder / name).mkdir(parents=True)
        return folder / name

    names: list[str] = []
    context: Any = SimpleNamespace(add_output=add_output)
    checkpoints.link(context, TRAINED)
    assert all((folder / name / "weights").read_text() == "whole" for name in names)
    return names


def test_models_are_kept_every_save_steps_but_not_at_the_end(tmp_path: Path) -> None:
    every_second = checkpoints(tmp_path)
    assert [step for step in range(9) if every_second.is_due(step)] == [2, 4, 6]
    assert [every_second.next_after(step) for step in (0, 1, 2, 7, 8)] == [2, 2, 4, 8, 8]
    never = checkpoints(tmp_path, save_steps=None)
    assert ([step for step in range(9) if never.is_due(step)], never.next_after(0)) == ([], 8)


@pytest.mark.parametrize(("limit", "kept"), [(None, [2, 4, 6]), (1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_newest_are_kept(limit: int | None, kept: list[int], tmp_path: Path) -> None:
    limited = checkpoints(tmp_path / "progress", save_total_limit=limit)
    (tmp_path / "progress").mkdir()
    keep(limited, 2, 4, 6)
    assert outputs(limited, tmp_path / "outputs") == [f"checkpoint-{step}" for step in kept]


def test_steps_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    long = IntermediateCheckpoints(tmp_path / "progress", TrainingConfig(save_steps=5, save_total_limit=2), 0, 101)
    keep(long, 5, 95, 100)
    assert outputs(long, tmp_path / "outputs") == ["checkpoint-95", "checkpoint-100"]


def test_a_killed_run_makes_later_ones_again_and_ends_with_the_same(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    progress.mkdir()
    keep(checkpoints(progress, save_total_limit=2), 2, 4, 6)
    export(progress / "checkpoint-00000002.partial", "half")  # killed while it wrote
    again = checkpoints(progress, step=3, save_total_limit=2)
    assert [step for step in range(3, 9) if again.is_due(step)] == [4, 6]
    keep(again, 4, 6)
    assert outputs(again, tmp_path / "outputs") == ["checkpoint-4", "checkpoint-6"]
    assert not checkpoints(progress, step=6).is_due(6), "it was complete before the kill"


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("sft", "model"),
        ("dpo", "model"),
        ("kto", "model"),
        ("distillation", "model"),
        ("continued_pretraining", "model"),
        ("rl", "model"),
        ("reward_model", "reward-model"),
        ("process_reward_model", "process-reward-model"),
    ],
)
def test_they_are_of_the_kind_of_the_stages_model(stage: str, kind: str) -> None:
    assert load_stage(stage).kind_of("checkpoint-40") == kind


@pytest.fixture
def run(machines: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SFT of six steps at a constant learning rate, on two ranks with ZeRO 2; a checkpoint of the progress after each step."""
    monkeypatch.setattr(training_loop, "REPORT_SECONDS", 0.0)
    resources = ResourcesConfig(device="cpu", engines=1, progress_seconds=1e-9, wait_timeout_seconds=120)

    def run_sft(name: str, kill_at: int = -1, **training: Any) -> tuple[StageResult, Any]:
        store, model, data = store_with(tmp_path / name, tiny_model(), demonstrations())
        call = sft_call(model, data, lr_scheduler_type="constant", **training)
        killer = Killer(machines(2), "trainers", kill_at)
        return run_stage(StageRequest(store, call, machines(2), resources, killer)), store

    return run_sft


@pytest.mark.slow
def test_a_checkpoint_is_the_model_of_a_run_that_ends_there_also_after_a_kill(run: Any, tiny_model: Any) -> None:
    whole, store = run("whole", save_steps=2)
    assert list(whole.outputs) == ["model", "checkpoint-2", "checkpoint-4"]
    shorter, _ = run("shorter", max_steps=4)
    assert whole.outputs["checkpoint-4"] == shorter.reference
    without, _ = run("without")
    assert whole.reference == without.reference
    weights = [
        transformers.AutoModelForCausalLM.from_pretrained(store.fetch(output)).state_dict()
        for output in whole.outputs.values()
    ]
    assert len({float(model["model.layers.0.mlp.up_proj.weight"].double().sum()) for model in weights}) == 3
    killed, _ = run("killed", kill_at=5, save_steps=2)
    assert killed.cost["restarts"] == 1
    assert killed.outputs == whole.outputs
    limited, _ = run("limited", kill_at=4, save_steps=2, save_total_limit=1)
    assert limited.outputs == {name: whole.outputs[name] for name in ("model", "checkpoint-4")}

    lora, store = run("lora", save_steps=4, lora={"r": 2, "target_modules": ["q_proj"]})
    assert list(lora.outputs) == ["model", "adapter", "checkpoint-4"]
    ended, ended_store = run("lora-ended", max_steps=4, lora={"r": 2, "target_modules": ["q_proj"]})
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model())
    beside = peft.PeftModel.from_pretrained(base, ended_store.fetch(ended.outputs["adapter"])).merge_and_unload()
    folder = store.fetch(lora.outputs["checkpoint-4"])
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in beside.state_dict().items():
        torch.testing.assert_close(tensor, merged[name])
    assert not (folder / "adapter").exists()

    half, store = run("bf16", save_steps=4, bf16=True)
    assert list(half.outputs) == ["model", "masters", "checkpoint-4"]
    folder = store.fetch(half.outputs["checkpoint-4"])
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert not (folder / "masters").exists()


@pytest.mark.slow
def test_a_reward_models_checkpoint_loads_as_a_classifier(machines: Any, tiny_model: Any, tmp_path: Path) -> None:
    ids = [[list(range(row, row + 6)) for row in range(start, start + 8)] for start in (0, 40, 80)]
    table = pa.table(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
    store, model, data = store_with(tmp_path, tiny_model(), table.append_column("margin", pa.nulls(8, pa.float32())))
    training = TrainingConfig(batch_size=4, learning_rate=1e-3, save_steps=1)
    config = RewardModelStageConfig(training=training).model_dump(mode="json")
    call = StageCall(stage="reward_model", label="judge", config=config, inputs={"model": model, "data": data})
    resources = ResourcesConfig(device="cpu", trainers=1, wait_timeout_seconds=120)
    result = run_stage(StageRequest(store, call, machines(1), resources, lambda *_: None))
    assert {name: output.kind for name, output in result.outputs.items()} == {
        "reward-model": "reward-model",
        "checkpoint-1": "reward-model",
    }
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(store.fetch(result.outputs["checkpoint-1"]))
    assert judge(torch.tensor([ids[0][0]])).logits.shape == (1, 1)


def test_only_what_keeps_models_changes_the_key(tmp_path: Path, tiny_model: Any) -> None:
    _, model, data = store_with(tmp_path, tiny_model(), demonstrations())
    usual = sft_call(model, data)
    assert not {"save_steps", "save_total_limit"} & usual.config["training"].keys()
    keys = {key_of(sft_call(model, data, save_steps=steps)).value for steps in (2, 3)}
    assert len({key_of(usual).value, *keys}) == 3
