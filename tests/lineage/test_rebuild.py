"""The plan of a rebuild, from records of stages that really ran: what runs, what is taken, what differs and what is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.artifacts.transfer import copy
from alignment_core.artifacts.transfer import plan as plan_copy
from alignment_core.data.pin import pin
from alignment_core.errors import UserError
from alignment_core.execution import key as key_module
from alignment_core.execution.base import StageCall, StageConfig
from alignment_core.lineage.rebuild import Rebuild, call_of, plan, resources_of
from alignment_core.recipes import DataConfig, ModelConfig
from alignment_core.rollout.schemas import rollout_schema, write_table
from alignment_core.stages.base_model import pin_model
from alignment_core.stages.dataset import DatasetConfig
from tests.conftest import TinyModel
from tests.stages.calls import run_alone

Stage = Callable[..., Reference]


@pytest.fixture
def stage(store: Store) -> Stage:
    def run(name: str, config: StageConfig | dict[str, Any], **inputs: Reference) -> Reference:
        content = config if isinstance(config, dict) else config.model_dump(mode="json")
        call = StageCall(stage=name, label=f"sft/{name}", config=content, inputs=inputs, seed=3)
        return run_alone(store, call).reference

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(9)))
    return path


@pytest.fixture
def dataset(stage: Stage, rows: Path, tiny_model: TinyModel) -> Reference:
    """A data set of a file, by the tokenizer of a folder."""
    model = stage("base_model", pin_model(ModelConfig(name=str(tiny_model()))))
    data = DataConfig.model_validate({"sources": [{"path": str(rows)}], "max_length": 99})
    pinned = tuple(pin(source) for source in data.sources)
    return stage("dataset", DatasetConfig(data=data, sources=pinned, kind="demonstrations"), tokenizer=model)


def labels(planned: Rebuild) -> list[str]:
    return [step.record.label for step in planned.steps if step.runs]


def test_every_stage_has_the_key_that_its_record_has_after_those_that_it_needs(store, dataset):
    planned = plan(store, dataset)
    assert labels(planned) == ["sft/base_model", "sft/dataset"]
    assert (planned.is_same, planned.taken, planned.missing) == (True, (), ())
    assert [(step.differs, step.problems) for step in planned.steps] == [((), ())] * 2
    assert planned.environment == ()


def test_a_rebuild_can_begin_from_data_or_with_a_stage(store, dataset):
    model = plan(store, dataset).steps[0].record.output
    with pytest.raises(UserError, match=r"--from data: the stage that made dataset@.* would not run"):
        plan(store, dataset, "data")
    from_stage = plan(store, dataset, "sft/dataset")
    assert (labels(from_stage), from_stage.taken) == (["sft/dataset"], (model,))
    assert labels(plan(store, dataset, "sft")) == ["sft/base_model", "sft/dataset"]
    with pytest.raises(
        UserError, match="--from rl: no stage behind the artifact has this label; give sources, data or one"
    ):
        plan(store, dataset, "rl")


def test_a_source_that_is_gone_or_changed_is_named_and_its_new_place_can_be_given(store, dataset, rows, tmp_path):
    moved = tmp_path / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    rows.rename(moved)
    planned = plan(store, dataset)
    assert not planned.is_same
    (problem,) = planned.steps[1].problems
    assert problem == f"{rows} is gone: put it back, or name its new place with --source {rows}=NEW"
    for old, new in ((rows, moved), (rows.parent, moved.parent)):
        assert plan(store, dataset, moved={str(old): str(new)}).is_same, "paths are in no key"
    assert not plan(store, dataset, moved={str(rows)[:-1]: str(moved)}).is_same, "a part of a name is no path"
    moved.write_text("{}")
    (problem,) = plan(store, dataset, moved={str(rows): str(moved)}).steps[1].problems
    assert problem.startswith(f"{moved} has other bytes than those that were read (sha256 ")


def test_changed_code_and_packages_are_named(store, dataset, monkeypatch):
    computed_by = key_module._computed_by
    module = "alignment_core.stages.dataset"

    def changed(*stage: Any) -> Any:
        parts = computed_by(*stage)
        return {**parts, "code": {**parts["code"], module: "0" * 16}} if module in parts["code"] else parts

    monkeypatch.setattr(key_module, "_computed_by", changed)
    planned = plan(store, dataset)
    assert not planned.is_same
    assert planned.steps[1].differs == (f"code of {module} changed",)
    assert planned.steps[0].differs == ()


def test_the_users_file_is_asked_for_with_the_place_of_its_kept_source(store, tmp_path):
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    row: dict[str, Any] = {"prompt": 0, "sample": 0, "prompt_ids": [1], "completion_ids": [2], "logps": [-1.0]}
    row |= {"finish_reason": "stop", "prompt_text": "a", "completion_text": "b", "label": None, "task": None}
    row |= {"source": "test", "policy": "model@sha256:" + "a" * 64}
    write_table([row], rollout_schema(), rollouts / "shard-00000.parquet")
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, completion, label):\n    return 0.5\n")
    inputs = {"rollouts": store.publish(rollouts, "rollouts")}
    call = StageCall(stage="score", label="score", config={"verifier": f"{reward}:score"}, inputs=inputs)
    scores = run_alone(store, call).reference
    planned = plan(store, scores)
    assert (planned.is_same, planned.taken) == (True, (inputs["rollouts"],)), "imported rollouts are taken"

    reward.write_text("def score(prompt, completion, label):\n    return 1.0\n")
    (step,) = plan(store, scores).steps
    assert len(step.differs) == 1
    assert step.differs[0].startswith("config.verifier.code: ")

    reward.rename(tmp_path / "moved.py")
    (step,) = plan(store, scores).steps
    kept = step.record.described_by["user-code"]
    assert str(reward) in step.problems[0]
    assert f"the user's source as it was is in {kept.short}" in step.problems[0]


def test_a_copy_without_ancestors_names_what_is_missing(store, dataset, tmp_path):
    colleague = open_store(tmp_path / "colleague")
    copy(store, colleague, plan_copy(store, colleague, dataset, ancestors=False))
    planned = plan(colleague, dataset)
    assert labels(planned) == ["sft/dataset"]
    assert "copy it there with --ancestors" in planned.missing[0]
    copy(store, colleague, plan_copy(store, colleague, dataset, ancestors=True))
    assert plan(colleague, dataset).is_same


def test_an_imported_artifact_cannot_be_rebuilt(store, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("w")
    with pytest.raises(UserError, match="it was imported, so there is nothing to rebuild"):
        plan(store, store.publish(tmp_path / "model", "model"))


def test_a_stage_gets_the_resources_of_its_recipe_and_of_its_hardware(store, dataset, tmp_path):
    record = plan(store, dataset).steps[0].record
    (tmp_path / "recipe").mkdir()
    settings = {"resources": {"kv_cache_mib": 64, "trainers": None, "threads": None, "of_another_version": 1}}
    (tmp_path / "recipe" / "settings.json").write_text(json.dumps(settings))
    described = {"recipe": store.publish(tmp_path / "recipe", "recipe")}
    hardware = {"device": "cpu", "trainers": 2, "engines": 1, "threads": 1, "zero_stage": 2, "engine_threads": None}
    made = record.model_copy(update={"described_by": described, "hardware": hardware})
    resources = resources_of(store, made)
    assert (resources.kv_cache_mib, resources.trainers, resources.threads, resources.zero_stage) == (64, 2, None, 2)
    without_recipe = record.model_copy(
        update={"hardware": hardware, "key_parts": {"passed": {"deepspeed": {"steps": 1}}}}
    )
    assert (resources_of(store, without_recipe).threads, resources_of(store, without_recipe).deepspeed) == (
        1,
        {"steps": 1},
    )
    assert resources.device == "cpu"


def test_the_inputs_of_a_call_are_those_that_were_made_again(store, dataset):
    record = plan(store, dataset).steps[1].record
    again = Reference("model", "1" * 64)
    assert call_of(record, {}, {record.inputs["tokenizer"]: again}).inputs == {"tokenizer": again}
