"""Lineage: from a model back to the rows, configurations, code and parents that made it, and forward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alignment_core.artifacts import Provenance, ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.data.pin import PinnedFile, PinnedSource
from alignment_core.lineage import Graph, text_tree, to_json
from alignment_core.recipes import DataConfig, DataSource
from alignment_core.reporting.picture import picture
from alignment_core.stages.dataset import DatasetConfig


@pytest.fixture
def references(store: Store, tmp_path: Path) -> dict[str, Reference]:
    """base (imported) and data → sft → pairs → dpo; sft is also the reference model of dpo."""
    references: dict[str, Reference] = {}

    def publish(name: str, kind: str, inputs: dict[str, str] | None = None, **fields: object) -> None:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "content").write_text(name)
        draft = ProvenanceDraft.model_validate(
            {
                "key": digest_of(name),
                "stage": name,
                "label": f"run/{name}",
                "seed": 7,
                "seconds": 12.34,
                "code_version": "c0ffee",
                "started_at": f"2026-01-01T00:00:0{len(references)}Z",
                "inputs": {role: references[other] for role, other in (inputs or {}).items()},
            }
            | fields
        )
        references[name] = store.publish(directory, kind, None if inputs is None else draft)

    publish("base", "model")
    source = PinnedSource(
        source=DataSource(path="rows.jsonl", rows=128),
        files=(PinnedFile(path="/d/rows.jsonl", sha256="5" * 64, size=9),),
    )
    data = DataConfig(sources=(source.source,), max_length=64)
    config = DatasetConfig(data=data, sources=(source,), kind="demonstrations").model_dump(mode="json")
    publish("data", "dataset", {}, stage="dataset", config=config)
    publish("sft", "model", {"base": "base", "train": "data"}, config={"learning_rate": 1e-5})
    publish("pairs", "dataset", {"policy": "sft"})
    publish(
        "dpo", "model", {"policy": "sft", "reference": "sft", "train": "pairs"}, metrics={"loss": 0.5, "note": "good"}
    )
    return references


def test_the_upward_tree_shows_stages_inputs_and_settings_of_a_model(store, references):
    short = {name: reference.short for name, reference in references.items()}
    empty, sources = digest_of({})[:12], store.records.find(digest_of("data")).config
    with Graph.of(store) as graph:
        assert text_tree(graph.up(references["dpo"])) == "\n".join(
            [
                f"{short['dpo']}",
                "│    by run/dpo (dpo), seed 7, 12.3 s",
                f"│    config {empty}, code c0ffee",
                "│    loss 0.5 and 1 more",
                f"├─ policy: {short['sft']}",
                "│  │    by run/sft (sft), seed 7, 12.3 s",
                f"│  │    config {digest_of({'learning_rate': 1e-5})[:12]}, code c0ffee",
                "│  │    learning_rate 1e-05",
                f"│  ├─ base: {short['base']}",
                "│  │       made outside: no record",
                f"│  └─ train: {short['data']}",
                "│     │    by run/data (dataset), seed 7, 12.3 s",
                f"│     │    config {digest_of(sources)[:12]}, code c0ffee",
                "│     │    data.max_length 64, kind demonstrations",
                "│     └─ source: /d/rows.jsonl, sha256 555555555555, rows 128",
                f"├─ reference: {short['sft']}  (shown above)",
                f"└─ train: {short['pairs']}",
                "   │    by run/pairs (pairs), seed 7, 12.3 s",
                f"   │    config {empty}, code c0ffee",
                f"   └─ policy: {short['sft']}  (shown above)",
            ]
        )


def test_the_downward_tree_shows_the_users_of_the_data(store, references):
    with Graph.of(store) as graph:
        node = graph.down(references["data"])
    assert [(child.role, child.reference) for child in node.children] == [("train", references["sft"])]
    (sft,) = node.children
    assert [(child.role, child.reference) for child in sft.children] == [
        ("policy", references["pairs"]),
        ("policy", references["dpo"]),
        ("reference", references["dpo"]),
    ]
    assert "source:" not in text_tree(node)


def test_an_unknown_artifact_is_a_tree_with_a_single_line(store, references):
    unknown = Reference("model", "0" * 64)
    with Graph.of(store) as graph:
        assert graph.up(unknown).children == graph.down(unknown).children == ()
        assert "no record" in text_tree(graph.up(unknown))


def test_the_json_view_is_plain_data_with_the_same_content(store, references):
    with Graph.of(store) as graph:
        data = json.loads(json.dumps(to_json(graph.up(references["dpo"]))))
    assert data["reference"] == str(references["dpo"])
    assert data["made_by"][0]["metrics"] == {"loss": 0.5, "note": "good"}
    assert [child["role"] for child in data["children"]] == ["policy", "reference", "train"]
    assert [child["repeated"] for child in data["children"]] == [False, True, False]
    rows = data["children"][0]["children"][1]["made_by"][0]["sources"]
    read = {"path": "/d/rows.jsonl", "sha256": "5" * 64, "rows": None, "commit": None, "version": None}
    assert rows == [{**read, "settings": {"rows": 128}}]
    assert data["children"][0]["made_by"][0]["settings"] == {"learning_rate": 1e-5}


def test_the_picture_shows_every_stage_and_source_once(store, references):
    with Graph.of(store) as graph:
        drawn = picture(graph, [references["dpo"], references["pairs"]])
    assert drawn is not None
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    base = references["base"].digest[:12]
    assert sorted(texts) == sorted(
        [f"run/{name}" for name in ("data", "sft", "pairs", "dpo")]
        + [f"{references[name].kind} {references[name].digest[:8]}" for name in ("data", "sft", "pairs", "dpo")]
        + ["model", base, "/d/rows.jsonl"]
    )
    with Graph.of(store) as graph:
        assert drawn == picture(graph, [references["dpo"], references["pairs"]]), "the same bytes again"


def record(name: str, output: Reference, **inputs: Reference) -> Provenance:
    return Provenance(key=digest_of(name), stage=name, label=name, outputs={output.kind: output}, inputs=inputs)


def test_a_stage_that_returns_its_own_input_does_not_loop():
    same = Reference("dataset", "1" * 64)
    graph = Graph([record("select", same, rows=same)])
    (child,) = graph.up(same).children
    assert child.repeated
    assert "shown above" in text_tree(graph.down(same))
    assert picture(graph, [same]).count(">select<") == 1


def test_two_stages_that_made_the_same_bytes_are_both_in_the_tree():
    same, first, second = (Reference("dataset", digit * 64) for digit in "123")
    node = Graph([record("first", same, rows=first), record("second", same, rows=second)]).up(same)
    assert {record.stage for record in node.made_by} == {"first", "second"}
    assert {child.reference for child in node.children} == {first, second}


def test_hundreds_of_rounds_make_a_single_tree():
    chain = [Reference("model", f"{number:064x}") for number in range(300)]
    graph = Graph(record(f"round-{n}", chain[n], policy=chain[n - 1]) for n in range(1, 300))
    assert text_tree(graph.up(chain[-1])).count("by round-") == 299
    assert to_json(graph.down(chain[0]))["children"][0]["reference"] == str(chain[1])


def test_a_label_cannot_break_out_of_the_picture():
    output = Reference("model", "1" * 64)
    drawn = picture(Graph([record("</text><script>$x", output)]), [output])
    assert drawn is not None
    assert "<script" not in drawn
    assert "&lt;/text&gt;&lt;script&gt;$x" in drawn


def test_a_batch_of_a_night_names_its_files():
    output = Reference("dataset", "1" * 64)
    listed = [3, {"rows": 2}, {"path": "a.jsonl", "rows": 2}, {"path": "b"}]
    batch = record("preference-batch", output).model_copy(update={"config": {"sources": listed}})
    assert [(source.path, source.rows) for source in Graph([batch]).up(output).sources] == [("a.jsonl", 2), ("b", None)]


def test_a_record_of_another_version_has_no_sources_and_all_its_settings():
    output = Reference("dataset", "1" * 64)
    rows = record("dataset", output).model_copy(update={"config": {"sources": [{"url": "x"}], "data": {"old": 1}}})
    (node, tree) = Graph([rows]).up(output), text_tree(Graph([rows]).up(output))
    assert node.sources == ()
    assert "data.old 1" in tree
