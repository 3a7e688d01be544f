"""The recipe, the environment and the user's source of a stage's run, which its record names as artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.artifacts import Provenance, Store, collect, open_store
from alignment_core.artifacts.paths import manifest_path
from alignment_core.artifacts.transfer import copy, plan
from alignment_core.execution.base import StageCall
from alignment_core.execution.description import recipe_files
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig, TrainingConfig, parse_recipe
from alignment_core.rollout.schemas import rollout_schema, write_table
from tests.stages.calls import HostAlone

RECIPE = {
    "name": "described",
    "method": "sft",
    "model": {"name": "example/model"},
    "sft": {"data": {"sources": [{"path": "rows.jsonl"}]}, "training": {"learning_rate": 3e-5}},
}
VERIFIER = "from helper import VALUE\n\ndef score(prompt, completion, label):\n    return VALUE  # as it was written\n"


@pytest.fixture
def scored(store: Store, tmp_path: Path) -> Callable[..., Provenance]:
    """Score one completion with a verifier in two files; returns the record."""
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    row: dict[str, Any] = {"prompt": 0, "sample": 0, "prompt_ids": [1], "completion_ids": [2], "logps": [-1.0]}
    row |= {"finish_reason": "stop", "prompt_text": "a", "completion_text": "b", "label": None, "task": None}
    row |= {"source": "test", "policy": "model@sha256:" + "a" * 64}
    write_table([row], rollout_schema(), rollouts / "shard-00000.parquet")
    inputs = {"rollouts": store.publish(rollouts, "rollouts")}

    def run(value: float = 0.5, **request: Any) -> Provenance:
        (tmp_path / "helper.py").write_text(f"VALUE = {value}\n")
        (tmp_path / "reward.py").write_text(VERIFIER)
        config = {"verifier": f"{tmp_path / 'reward.py'}:score"}
        call = StageCall(stage="score", label="score", config=config, inputs=inputs)
        result = run_stage(StageRequest(store, call, HostAlone(), ResourcesConfig(), lambda *_: None, **request))
        record = store.records.find(result.key)
        assert record is not None
        return record

    return run


def test_a_record_names_the_recipe_as_it_was_written_and_all_of_its_settings(store, scored):
    files = recipe_files(parse_recipe(RECIPE))
    record = scored(recipe=files, overrides=("sft.training.learning_rate=3e-5",))
    folder = store.fetch(record.described_by["recipe"])
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == RECIPE
    assert recipe_files(parse_recipe(yaml.safe_load((folder / "recipe.yaml").read_text()))) == files
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["sft"]["training"]["learning_rate"] == 3e-5
    assert settings["sft"]["training"]["num_train_epochs"] == TrainingConfig().num_train_epochs
    assert record.overrides == ("sft.training.learning_rate=3e-5",)


def test_a_record_names_the_environment_and_the_users_source_to_the_byte(store, scored, tmp_path):
    record = scored()
    environment = json.loads((store.fetch(record.described_by["environment"]) / "environment.json").read_text())
    assert environment["distributions"]["pyarrow"] == record.packages["pyarrow"]
    assert environment["code"]["version"] in record.code_version
    folder = store.fetch(record.described_by["user-code"])
    kept = json.loads((folder / "files.json").read_text())
    assert kept["without_secrets"] == []
    assert {path: (folder / name).read_text() for path, name in kept["files"].items()} == {
        str(tmp_path / name): (tmp_path / name).read_text() for name in ("helper.py", "reward.py")
    }
    assert "recipe" not in record.described_by, "it did not run in a recipe's run"


def test_stages_of_one_run_share_their_descriptions(store, scored):
    first, second = scored(0.5, recipe={"recipe.yaml": "a"}), scored(1.0, recipe={"recipe.yaml": "a"})
    assert first.described_by["recipe"] == second.described_by["recipe"]
    assert first.described_by["environment"] == second.described_by["environment"]
    assert first.described_by["user-code"] != second.described_by["user-code"]


def test_the_descriptions_of_a_record_are_no_garbage_and_travel_with_its_artifacts(store, scored, tmp_path):
    record = scored(recipe={"recipe.yaml": "a"})
    assert collect(store, delete=True, older_than=-1).garbage == ()
    target = open_store(tmp_path / "other")
    copy(store, target, plan(store, target, record.output, ancestors=False))
    assert target.records.find(record.key) == record
    for reference in record.described_by.values():
        assert (target.fetch(reference) / "..").exists()
        assert target.verify(reference) == []
    assert collect(target, delete=True, older_than=-1).garbage == ()


def test_an_artifact_whose_descriptions_are_gone_is_copied_without_them(store, scored, tmp_path):
    """A collector of an earlier version knows inputs and outputs only."""
    record = scored(recipe={"recipe.yaml": "a"})
    for reference in record.described_by.values():
        store.backend.delete(manifest_path(reference.digest))
    target = open_store(tmp_path / "other")
    assert copy(store, target, plan(store, target, record.output, ancestors=False)).artifacts == (record.output,)
