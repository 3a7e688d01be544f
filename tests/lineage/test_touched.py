"""What a file, a row of it or a Hub name touched: by hand-made stages, and by the sources of real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from alignment.flows.cli.main import app
from alignment_core.artifacts import ProvenanceDraft, Reference, Store, prune
from alignment_core.artifacts.paths import STAGES
from alignment_core.artifacts.read_sources import ReadSource, read_sources
from alignment_core.canonical import digest_of
from alignment_core.data.pin import PinnedFile, PinnedSource
from alignment_core.errors import UnknownName
from alignment_core.lineage.sources import sources_of
from alignment_core.lineage.touched import touched
from alignment_core.recipes import DataConfig, DataSource
from alignment_core.stages.dataset import DatasetConfig
from tests.lineage.test_lineage_graph import record

Make = Callable[..., Reference]


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Make:
    """Publish the output of a stage with some rows of text, read from files."""

    def publish(name: str, kind: str, *texts: str, reads: Mapping[str, str] = {}, **inputs: Reference) -> Reference:
        folder = tmp_path / digest_of(name)[:8]
        folder.mkdir()
        pq.write_table(pa.table({"text": pa.array([name, *texts])}), folder / "train.parquet")
        config = {"sources": [{"path": path, "sha256": digest} for path, digest in reads.items()]}
        made: dict[str, Any] = {
            "key": digest_of(name),
            "stage": kind,
            "label": name,
            "inputs": inputs,
            "config": config,
        }
        return store.publish(folder, kind, ProvenanceDraft(**made, finished_at=f"2026-11-0{len(name) % 9}"))

    return publish


@pytest.fixture
def graph(make: Make, store: Store) -> dict[str, Reference]:
    """Two files; the first one's rows trained a policy that was production, and the one that is."""
    made = {}
    made["ada"] = make("ada", "dataset", "Ada's address", "another", reads={"/d/ada.jsonl": "a" * 64})
    made["ada-2"] = make("ada-2", "dataset", "another", reads={"/d/ada.jsonl": "b" * 64})
    made["bob"] = make("bob", "dataset", "Bob's address", reads={"/d/bob.jsonl": "c" * 64})
    made["sft"] = make("sft", "model", data=made["ada"])
    made["rollouts"] = make("rollouts", "rollouts", policy=made["sft"], prompts=made["bob"])
    made["dpo"] = make("dpo", "model", model=made["sft"], data=made["rollouts"])
    made["other"] = make("other", "model", data=made["bob"])
    for name in ("sft", "dpo"):
        store.tags.move("policy/production", made[name], store.tags.get("policy/production"), name)
    return made


def names(found: Any, graph: dict[str, Reference]) -> list[str]:
    by_reference = {reference: name for name, reference in graph.items()}
    return [by_reference[artifact.reference] for artifact in found.artifacts]


def test_a_file_touched_everything_that_was_made_from_any_version_of_it_tags_first(store, graph):
    found = touched(store, "ada.jsonl")
    assert found.sources == {"/d/ada.jsonl": ["a" * 64, "b" * 64]}
    assert names(found, graph)[:2] == ["dpo", "sft"], "production now, then production once"
    assert set(names(found, graph)) == {"dpo", "sft", "ada", "ada-2", "rollouts"}
    dpo, sft = found.artifacts[:2]
    assert [(tag.tag, tag.moves, tag.now) for tag in (*dpo.tags, *sft.tags)] == [
        ("policy/production", [2], True),
        ("policy/production", [1], False),
    ]
    assert set(names(touched(store, "bob"), graph)) == {"bob", "rollouts", "dpo", "other"}


def test_a_row_touched_only_what_was_made_from_data_sets_that_have_it(store, graph):
    found = touched(store, "ada.jsonl", row="Ada's address")
    assert set(names(found, graph)) == {"dpo", "sft", "ada", "rollouts"}
    assert found.without_row == [graph["ada-2"]]
    assert touched(store, "ada.jsonl", row="nobody's").artifacts == []


def test_a_pruned_data_set_counts_as_if_it_had_the_row(store, make):
    rows = make("rows", "rollouts", "text", reads={"x.jsonl": "d" * 64})
    prune(store, None, 0, delete=True)
    found = touched(store, "x.jsonl", row="text")
    assert (found.unknown, [artifact.reference for artifact in found.artifacts]) == ([rows], [rows])


def test_a_row_of_a_night_is_found_whatever_its_json_escapes(store, tmp_path):
    (tmp_path / "batch").mkdir()
    row = {"prompt": [{"role": "user", "content": 'say "hi"\nand ü'}], "chosen": "a", "rejected": "b"}
    (tmp_path / "batch" / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = {"sources": [{"path": "day.jsonl", "rows": 1, "sha256": "e" * 64}]}
    made = {"key": digest_of("night"), "stage": "preference-batch", "label": "rows", "config": config}
    batch = store.publish(tmp_path / "batch", "preference-batch", ProvenanceDraft.model_validate(made))
    for text in ('say "hi"', 'hi"\nand', "ü"):
        assert [artifact.reference for artifact in touched(store, "day.jsonl", row=text).artifacts] == [batch]
    assert touched(store, "day.jsonl", row="hi there").without_row == [batch]


def test_a_source_is_found_by_the_beginning_of_its_digest_and_an_unknown_one_names_those_near(store, graph):
    assert set(touched(store, "c" * 12).sources) == {"/d/bob.jsonl"}
    with pytest.raises(UnknownName, match=r"no stage of .* read '/d/adda.jsonl'; sources are /d/ada.jsonl"):
        touched(store, "/d/adda.jsonl")
    with pytest.raises(UnknownName):
        touched(store, "d_ada")  # no pattern


def test_the_command_lists_tags_then_models(store, graph):
    command = ["touched", "ada.jsonl", "--store", store.uri]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"policy/production points to it now: {graph['dpo'].short}" in result.output
    assert f"policy/production pointed to it (move 1): {graph['sft'].short}" in result.output
    assert result.output.index("model: 2") < result.output.index("dataset: 2") < result.output.index("rollouts: 1")
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert data["artifacts"][0]["tags"] == [{"tag": "policy/production", "moves": [2], "now": True}]


def test_many_artifacts_of_a_kind_are_counted(store, make):
    data = make("data", "dataset", reads={"x": "d" * 64})
    for number in range(23):
        make(f"model {number}", "model", data=data)
    result = CliRunner().invoke(app, ["touched", "x", "--store", store.uri])
    assert "model: 23" in result.output
    assert "… 3 more (--all lists them)" in result.output
    assert "… 3 more" not in CliRunner().invoke(app, ["touched", "x", "--all", "--store", store.uri]).output


@pytest.mark.parametrize(
    ("stage", "config", "expected"),
    [
        (
            "dataset",
            DatasetConfig(
                data=DataConfig(sources=(DataSource(path="rows.jsonl"),), max_length=64),
                sources=(
                    PinnedSource(
                        source=DataSource(path="rows.jsonl"),
                        files=(PinnedFile(path="/d/rows.jsonl", sha256="5" * 64, size=9),),
                    ),
                    PinnedSource(source=DataSource(path="org/rows"), hub_commit="c0ffee"),
                ),
                kind="demonstrations",
            ).model_dump(mode="json"),
            [("/d/rows.jsonl", "5" * 64, ""), ("org/rows", "", "c0ffee")],
        ),
        (
            "base_model",
            {"model": {"name": "/models/one/"}, "files": {"model.safetensors": "6" * 64}},
            [("/models/one/model.safetensors", "6" * 64, "")],
        ),
        ("base_model", {"model": {"name": "org/model"}, "commit": "abc"}, [("org/model", "", "abc")]),
        ("merge_adapter", {"adapter": "org/adapter", "commit": "abc"}, [("org/adapter", "", "abc")]),
        (
            "preference-batch",
            {"sources": [{"path": "a.jsonl", "rows": 2, "sha256": "7" * 64}]},
            [("a.jsonl", "7" * 64, "")],
        ),
    ],
)
def test_sources_are_found_in_a_record_without_knowing_its_stage(stage, config, expected):
    assert read_sources(config) == [ReadSource(*source) for source in expected]
    known = sources_of(record(stage, Reference("model", "1" * 64)).model_copy(update={"config": config}))
    assert {(source.path, source.sha256 or "", source.commit or source.version or "") for source in known} == set(
        expected
    )


def test_the_index_knows_the_cost_of_runs_and_what_a_description_describes(store, tmp_path):
    def publish(name: str, run: str, seconds: float) -> Reference:
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text(name)
        (tmp_path / f"{name}-recipe").mkdir()
        (tmp_path / f"{name}-recipe" / "recipe.yaml").write_text(run)
        made = {"key": digest_of(name), "stage": "sft", "label": name, "run_ids": {"prefect": run}, "seconds": seconds}
        draft = ProvenanceDraft(**made, cost={"device_seconds": 2 * seconds})
        described = {"recipe": (tmp_path / f"{name}-recipe", "recipe")}
        return store.publish_outputs({"model": (tmp_path / name, "model")}, draft, described)["model"]

    for name, run, seconds in (("a", "one", 1.0), ("b", "one", 2.0), ("c", "two", 4.0)):
        publish(name, run, seconds)
    with store.index.view(STAGES) as view:
        costs = {run: (cost.stages, cost.seconds, cost.device_seconds) for run, cost in view.runs().items()}
        assert costs == {"one": (2, 3.0, 6.0), "two": (1, 4.0, 8.0)}
        assert {made.label for made in view.of_run("one")} == {"a", "b"}
        (made,) = view.of_run("two")
        (brief,) = view.history(made.output)
        assert (brief.key, brief.stage, brief.label, brief.run) == (made.key, "sft", "c", "two")
        assert (brief.seconds, brief.device_seconds, brief.outputs) == (4.0, 8.0, made.outputs)
        (recipe,) = {made.described_by["recipe"] for made in view.of_run("one")}
        assert {made.label for made in view.described(recipe)} == {"a", "b"}
