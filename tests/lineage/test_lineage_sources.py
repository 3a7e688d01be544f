"""From the records of stages that really ran back to files, Hub names, tasks and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.canonical import digest_of_file
from alignment_core.data.addresses import RemoteFile
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.execution.base import StageCall, StageConfig
from alignment_core.lineage import Graph, Tree, text_tree
from alignment_core.lineage.sources import settings_of, sources_of
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import DataConfig, DataSource, ModelConfig, TrainingConfig
from alignment_core.stages.base_model import BaseModelConfig, pin_model
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.stages.sft import SftStageConfig
from tests.stages.calls import run_alone


@pytest.fixture
def run(store: Store) -> tuple[Store, Callable[..., Reference]]:
    def stage(name: str, config: StageConfig, **inputs: Reference) -> Reference:
        call = StageCall(stage=name, label=name, config=config.model_dump(mode="json"), inputs=inputs, seed=3)
        return run_alone(store, call).reference

    return store, stage


def test_a_data_set_leads_back_to_its_files_tasks_and_model_with_their_digests(run, tmp_path):
    store, stage = run
    folder = tmp_path / "model"
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(9)))
    columns = {"prompt": "question", "completion": "answer"}
    data = DataConfig.model_validate(
        {"sources": [{"path": str(rows), "columns": columns}, {"task": "first", "rows": 7}], "max_length": 99}
    )
    model = stage("base_model", pin_model(ModelConfig(name=str(folder))))
    pinned = tuple(pin(source) for source in data.sources)
    dataset = stage("dataset", DatasetConfig(data=data, sources=pinned, kind="demonstrations"), tokenizer=model)

    with Graph.of(store) as graph:
        tree = Tree(graph, dataset, upward=True)
    node = tree.nodes[dataset]
    files, task = node.sources
    assert (files.path, files.sha256) == (str(rows), digest_of_file(rows))
    assert dict(files.settings) == {"columns.completion": "answer", "columns.prompt": "question"}
    assert (task.path, dict(task.settings)) == ("task:first/train", {"rows": 7})
    (parent,) = node.branches
    weights = {source.path: source.sha256 for source in tree.nodes[parent.reference].sources}
    assert weights[f"{folder}/model.safetensors"] == digest_of_file(folder / "model.safetensors")
    assert settings_of(node.made_by[0]) == {"data.max_length": 99, "kind": "demonstrations"}
    text = text_tree(tree, width=400)
    assert f"source: {rows}, sha256 {digest_of_file(rows)[:12]}, columns.completion answer" in text
    assert "data.max_length 99, kind demonstrations" in text


def record(stage: str, config: StageConfig) -> Provenance:
    output = Reference("model", "1" * 64)
    return Provenance(
        key="2" * 64, stage=stage, label=stage, outputs={"data": output}, config=config.model_dump(mode="json")
    )


def test_names_on_the_hub_are_listed_with_their_commits():
    source = PinnedSource(source=DataSource(path="org/rows", split="test"), hub_commit="c" * 40)
    data = DatasetConfig(data=DataConfig(sources=(source.source,)), sources=(source,), kind="demonstrations")
    (pinned,) = sources_of(record("dataset", data))
    assert (pinned.path, pinned.commit, dict(pinned.settings)) == ("org/rows", "c" * 40, {"split": "test"})
    model = BaseModelConfig(model=ModelConfig(name="org/model"), commit="d" * 40)
    (pinned,) = sources_of(record("base_model", model))
    assert (pinned.path, pinned.commit) == ("org/model", "d" * 40)


def test_only_settings_that_differ_from_the_defaults_are_shown():
    config = SftStageConfig(training=TrainingConfig(learning_rate=1e-3, batch_size=TrainingConfig().batch_size))
    assert settings_of(record("sft", config)) == {"training.learning_rate": 1e-3}


def test_files_of_a_model_at_an_address_are_sources_and_no_settings():
    remote = {"config.json": RemoteFile(address="s3://bucket/base/config.json", version='"etag"', size=2)}
    config = BaseModelConfig(model=ModelConfig(name="s3://bucket/base"), remote=remote)
    assert settings_of(record("base_model", config)) == {}
    (source,) = sources_of(record("base_model", config))
    assert (source.path, source.version) == ("s3://bucket/base/config.json", '"etag"')


def test_records_with_fields_that_are_refused_today_keep_their_sources():
    config = {"sources": [{"source": {"task": "reverse", "subset": "main", "revision": "v1"}}]}
    (source,) = sources_of(SimpleNamespace(stage="dataset", config=config))  # type: ignore[arg-type]
    assert source.path == "task:reverse/train"


def test_the_purpose_in_a_record_of_an_earlier_version_is_a_kind_of_rows() -> None:
    data = DataConfig.model_validate({"path": "org/rows", "max_length": 99})
    dumped = DatasetConfig(data=data, sources=(), kind="preferences").model_dump(mode="json")
    earlier = {**{name: value for name, value in dumped.items() if name != "kind"}, "purpose": "preference"}
    assert DatasetConfig.model_validate(earlier).model_dump(mode="json") == dumped
