"""Lineage: from a model back to the rows, configurations, code and parents that made it, and forward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alignment_core.artifacts import Provenance, ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.data.pin import PinnedFile, PinnedSource
from alignment_core.lineage import Graph, Tree, text_tree, to_json
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
        assert text_tree(Tree(graph, references["dpo"], upward=True)) == "\n".join(
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
        tree = Tree(graph, references["data"], upward=False)
    assert edges(tree, "data", references) == [("train", "sft", False)]
    assert edges(tree, "sft", references) == [
        ("policy", "pairs", False),
        ("policy", "dpo", False),
        ("reference", "dpo", True),
    ]
    assert edges(tree, "pairs", references) == [("train", "dpo", True)], "dpo is nearer to the data by way of sft"
    assert "source:" not in text_tree(tree)


def test_an_unknown_artifact_is_a_tree_with_a_single_line(store, references):
    unknown = Reference("model", "0" * 64)
    with Graph.of(store) as graph:
        for upward in (True, False):
            assert Tree(graph, unknown, upward).nodes[unknown].branches == ()
        assert "no record" in text_tree(Tree(graph, unknown, upward=True))


def test_the_json_view_is_plain_data_with_the_same_content(store, references):
    with Graph.of(store) as graph:
        data = json.loads(json.dumps(to_json(Tree(graph, references["dpo"], upward=True))))
        down = to_json(Tree(graph, references["data"], upward=False))
    assert data["reference"] == str(references["dpo"])
    nodes = {node["reference"]: node for node in data["artifacts"]}
    dpo, sft, rows = (nodes[str(references[name])] for name in ("dpo", "sft", "data"))
    assert dpo["made_by"][0]["metrics"] == {"loss": 0.5, "note": "good"}
    used = {"policy": "sft", "reference": "sft", "train": "pairs"}
    assert dpo["inputs"] == [{"role": role, "reference": str(references[name])} for role, name in used.items()]
    read = {"path": "/d/rows.jsonl", "sha256": "5" * 64, "rows": None, "commit": None, "version": None}
    assert rows["made_by"][0]["sources"] == [{**read, "settings": {"rows": 128}}]
    assert sft["made_by"][0]["settings"] == {"learning_rate": 1e-5}
    assert down["artifacts"][0]["used_by"] == [{"role": "train", "reference": str(references["sft"])}]


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


def edges(tree: Tree, name: str, references: dict[str, Reference]) -> list[tuple[str, str, bool]]:
    """(role, name, repeated) of the branches of an artifact."""
    names = {reference: name for name, reference in references.items()}
    return [(branch.role, names[branch.reference], branch.repeated) for branch in tree.nodes[references[name]].branches]


def record(name: str, output: Reference, **inputs: Reference) -> Provenance:
    return Provenance(key=digest_of(name), stage=name, label=name, outputs={output.kind: output}, inputs=inputs)


def test_a_stage_that_returns_its_own_input_does_not_loop():
    same = Reference("dataset", "1" * 64)
    graph = Graph([record("select", same, rows=same)])
    (branch,) = Tree(graph, same, upward=True).nodes[same].branches
    assert branch.repeated
    assert "shown above" in text_tree(Tree(graph, same, upward=False))
    assert picture(graph, [same]).count(">select<") == 1


def test_two_stages_that_made_the_same_bytes_are_both_in_the_tree():
    same, first, second = (Reference("dataset", digit * 64) for digit in "123")
    graph = Graph([record("first", same, rows=first), record("second", same, rows=second)])
    node = Tree(graph, same, upward=True).nodes[same]
    assert {record.stage for record in node.made_by} == {"first", "second"}
    assert {branch.reference for branch in node.branches} == {first, second}


class Nights:
    """Nights that train on from the policy of the night before, on pairs of its own completions and on the night's rows."""

    def __init__(self, count: int, source: str = "preference-batch") -> None:
        self.policies = [Reference("model", digest_of("base"))]
        self.prompts = Reference("dataset", digest_of("prompts"))
        self.records = []
        for night in range(1, count + 1):
            policy = self.policies[-1]
            rows = self._stage(night, source, "dataset")
            rollouts = self._stage(night, "generate", "rollouts", policy=policy, prompts=self.prompts)
            pairs = self._stage(night, "select", "dataset", rollouts=rollouts, rows=rows)
            self.policies.append(self._stage(night, "dpo", "model", data=pairs, model=policy))

    @property
    def graph(self) -> Graph:
        return Graph(self.records)

    def _stage(self, night: int, stage: str, kind: str, **inputs: Reference) -> Reference:
        output = Reference(kind, digest_of([stage, night]))
        made = {"key": digest_of([night, stage, "key"]), "stage": stage, "label": f"round-1/{stage}", "inputs": inputs}
        at = f"2026-{1 + night // 28 % 12:02}-{1 + night % 28:02}"
        self.records.append(
            Provenance(**made, outputs={kind: output}, run_ids={"prefect": f"night-{night}"}, started_at=at)  # type: ignore[arg-type]
        )
        return output


def test_a_long_chain_of_nights_is_shown_by_its_ends():
    nights = Nights(1000)
    tree = Tree(nights.graph, nights.policies[-1], upward=True)
    text = text_tree(tree, width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    assert [line.strip("│├└─ ") for line in lines if "between" in line] == ["… 997 nights between (--all shows them)"]
    for shown in (1000, 999, 1):
        assert nights.policies[shown].short in text
    assert f"policy: {nights.policies[998].short}  (left out with its round)" in text, "999 was sampled from it"
    assert len(to_json(tree)["artifacts"]) == 1000 * 4 + 2, "programs read all of it"


def test_the_picture_of_a_long_chain_of_nights_shows_its_ends():
    nights = Nights(1000)
    drawn = picture(nights.graph, [nights.policies[-1]])
    assert drawn is not None
    assert drawn.count(">round-1/dpo<") == 3
    assert (">… 997<" in drawn, ">nights between<" in drawn) == (True, True)


def test_all_of_a_long_chain_is_no_wider_than_the_terminal():
    nights = Nights(1000)
    lines = text_tree(Tree(nights.graph, nights.policies[-1], upward=True), width=80, everything=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("by round-1/dpo" in line for line in lines) == 1000
    assert sum("(continued below)" in line for line in lines) == sum("  (continued)" in line for line in lines) > 10


def test_what_many_nights_made_from_one_artifact_is_shown_by_its_ends():
    nights = Nights(300)
    text = text_tree(Tree(nights.graph, nights.prompts, upward=False), width=100)
    assert "… 297 more like these (--all shows them)" in text
    assert len(text.splitlines()) < 60


def test_short_chains_are_whole_and_rounds_are_no_nights():
    assert "between" not in text_tree(Tree(Nights(4).graph, Nights(4).policies[-1], upward=True))
    rounds = [made.model_copy(update={"run_ids": {"prefect": "one"}}) for made in Nights(9, "dataset").records]
    assert "6 rounds between" in text_tree(Tree(Graph(rounds), Nights(9).policies[-1], upward=True))
    assert "6 generations between" in text_tree(Tree(Nights(9, "dataset").graph, Nights(9).policies[-1], upward=True))


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
    assert [
        (source.path, source.rows) for source in Tree(Graph([batch]), output, upward=True).nodes[output].sources
    ] == [("a.jsonl", 2), ("b", None)]


def test_a_record_of_another_version_has_no_sources_and_all_its_settings():
    output = Reference("dataset", "1" * 64)
    rows = record("dataset", output).model_copy(update={"config": {"sources": [{"url": "x"}], "data": {"old": 1}}})
    tree = Tree(Graph([rows]), output, upward=True)
    assert tree.nodes[output].sources == ()
    assert "data.old 1" in text_tree(tree)
