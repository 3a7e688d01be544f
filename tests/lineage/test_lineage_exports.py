"""Lineage in formats of other programs: Graphviz, SVG and OpenLineage's events."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from uuid import UUID

import pytest

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.lineage import Graph, Tree
from alignment_core.lineage.diagram import diagram, to_dot
from alignment_core.lineage.events import events_of
from alignment_core.reporting.picture import draw
from tests.lineage.test_lineage_graph import Nights, record

HOSTILE = 'a"]; evil [label="x\\" \\N <b>&amp;</b>\\'
QUOTED = r'"(?:[^"\\\n]|\\.)*"'
NODE = re.compile(rf"  n\d+ \[label=({QUOTED}), fillcolor=\"#[0-9a-f]{{6}}\"\];")
EDGE = re.compile(rf"  n\d+ -> n\d+(?: \[label=({QUOTED})\])?;")


def labels(dot: str) -> list[str]:
    """The labels of nodes, after a strict check that the text is a digraph of nodes and edges and nothing else."""
    first, style, *lines, last = dot.split("\n")
    assert (first, style, last) == ("digraph lineage {", '  node [shape=box, style="rounded,filled"];', "}")
    nodes = [match for line in lines if (match := NODE.fullmatch(line))]
    edges = [line for line in lines if EDGE.fullmatch(line)]
    assert len(nodes) + len(edges) == len(lines), lines
    declared = {line.split()[0] for line in lines if NODE.fullmatch(line)}
    assert {name for line in edges for name in re.findall(r"\bn\d+\b", line.partition("[")[0])} <= declared
    return [_unescaped(match[1][1:-1]) for match in nodes]


def _unescaped(label: str) -> str:
    """As Graphviz shows a label: ``\\n`` ends a line, another backslash stands for the character behind it."""
    shown = re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], label)
    return shown.replace("&amp;", "&")


def test_dot_has_a_node_for_each_stage_and_source_and_an_edge_for_each_use():
    rows, model = Reference("dataset", "1" * 64), Reference("model", "2" * 64)
    graph = Graph([record("sft", model, train=rows, held_out=rows)])
    dot = to_dot(diagram(graph, [Tree(graph, model, upward=True)]))
    assert sorted(labels(dot)) == ["dataset\n" + "1" * 12, "sft\nmodel 22222222"]
    assert dot.count("->") == 1


def test_hostile_labels_stay_inside_the_quotes():
    output = Reference("model", "1" * 64)
    for label in (HOSTILE, "x\\", '"', "a\nb\x1b[31m\u202e", "\\n", "&lt;"):
        graph = Graph([record(label, output)])
        (shown,) = labels(to_dot(diagram(graph, [Tree(graph, output, upward=True)])))
        expected = label.replace("\n", " ").replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
        assert shown == f"{expected}\nmodel 11111111"


def test_hostile_names_of_outputs_and_sources_stay_inside_the_quotes():
    one, two, later = (Reference("model", digit * 64) for digit in "123")
    source = {"path": HOSTILE, "rows": 1}
    maker = record("rl", one).model_copy(
        update={"outputs": {HOSTILE: one, "last": two}, "config": {"sources": [source]}}
    )
    graph = Graph([maker, record("merge", later, policy=one)])
    dot = to_dot(diagram(graph, [Tree(graph, later, upward=True)]))
    assert HOSTILE in labels(dot)
    (edge,) = [match[1] for line in dot.split("\n") if (match := EDGE.fullmatch(line)) and match[1]]
    assert _unescaped(edge[1:-1]) == HOSTILE


def test_an_artifact_without_records_and_a_cycle_are_valid_diagrams():
    same = Reference("dataset", "1" * 64)
    for graph in (Graph([]), Graph([record("select", same, rows=same)])):
        for upward in (True, False):
            drawn = diagram(graph, [Tree(graph, same, upward)])
            assert len(labels(to_dot(drawn))) == 1
            ElementTree.fromstring(str(draw(drawn)))


def test_a_long_chain_is_collapsed_like_the_tree_unless_all_is_asked_for():
    nights = Nights(100)
    for upward, root in ((True, nights.policies[-1]), (False, nights.policies[0])):
        tree = Tree(nights.graph, root, upward)
        collapsed = labels(to_dot(diagram(nights.graph, [tree])))
        assert len(collapsed) < 30
        assert [label for label in collapsed if "between" in label] == [f"… 97\n{tree.unit} between"]
        everything = labels(to_dot(diagram(nights.graph, [tree], everything=True)))
        assert sum(label.startswith("round-1/dpo") for label in everything) == 100
        assert not any("between" in label for label in everything)


def test_artifacts_that_are_left_out_beside_each_other_have_a_box_with_their_number():
    nights = Nights(300)
    drawn = diagram(nights.graph, [Tree(nights.graph, nights.prompts, upward=False)])
    assert "… 297\nmore like these" in labels(to_dot(drawn))


def test_svg_is_well_formed_with_control_characters_in_a_label():
    output = Reference("model", "1" * 64)
    graph = Graph([record("\x00\x1b<script>", output)])
    svg = str(draw(diagram(graph, [Tree(graph, output, upward=True)])))
    ElementTree.fromstring(svg)
    assert "<script" not in svg


def publish(store: Store, folder: Path, name: str, kind: str, **fields: object) -> Reference:
    from alignment_core.artifacts import ProvenanceDraft

    (folder / name).mkdir()
    (folder / name / "file").write_text(name)
    times = {
        "started_at": f"2026-11-0{len(name)}T01:00:00+00:00",
        "finished_at": f"2026-11-0{len(name)}T02:00:00+00:00",
    }
    draft = {"key": digest_of(name), "stage": name, "label": f"run/{name}", **times, **fields}
    return store.publish(folder / name, kind, ProvenanceDraft(**draft))  # type: ignore[arg-type]


def test_each_record_behind_an_artifact_is_a_complete_event_oldest_first(store: Store, tmp_path: Path):
    rows = publish(store, tmp_path, "data", "dataset")
    secret = "hf_" + "a1" * 12
    metrics = {"loss": 0.5, "gap": float("inf"), "passed": True, "note": secret, "list": [1]}
    run = "0eb1c584-1111-4111-8111-111111111111"
    model = publish(
        store,
        tmp_path,
        "train",
        "model",
        inputs={"rows": rows, "again": rows},
        metrics=metrics,
        run_ids={"prefect": run},
    )
    with Graph.of(store) as graph:
        tree = Tree(graph, model, upward=True)
    lines = list(events_of(store, [tree]))
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert [event["job"]["name"] for event in (first, second)] == ["run/data", "run/train"]
    assert {event["eventType"] for event in (first, second)} == {"COMPLETE"}
    assert first["inputs"] == []
    assert [(used["namespace"], used["name"]) for used in second["inputs"]] == [(store.uri, str(rows))]
    assert [(made["namespace"], made["name"]) for made in second["outputs"]] == [(store.uri, str(model))]
    assert second["eventTime"] == "2026-11-05T02:00:00+00:00"
    assert second["run"]["facets"]["alignment_stage"]["metrics"] == {"loss": 0.5}
    assert second["run"]["facets"]["parent"]["run"]["runId"] == run
    assert "parent" not in first["run"]["facets"]
    assert UUID(first["run"]["runId"]) != UUID(second["run"]["runId"])
    assert lines == list(events_of(store, [tree])), "the same ids again"
    assert secret not in "".join(lines)


def test_events_name_the_recipe_of_a_run_if_its_record_has_it(store: Store, tmp_path: Path):
    from alignment_core.artifacts import ProvenanceDraft

    for name, content in (("out", "x"), ("recipe", '{"name": "small"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("settings.json" if name == "recipe" else "file")).write_text(content)
    draft = ProvenanceDraft(key=digest_of("sft"), stage="sft", label="sft", finished_at="2026-11-01T01:00:00+00:00")
    described = {"recipe": (tmp_path / "recipe", "recipe")}
    model = store.publish_outputs({"model": (tmp_path / "out", "model")}, draft, described)["model"]
    with Graph.of(store) as graph:
        (line,) = events_of(store, [Tree(graph, model, upward=True)])
    assert json.loads(line)["job"]["namespace"] == "small"


def test_a_record_without_times_is_a_valid_event():
    from alignment_core.tracking.openlineage_events import of_record, to_json

    made = Provenance(key="1" * 64, stage="sft", label=HOSTILE, outputs={"model": Reference("model", "1" * 64)})
    event = json.loads(to_json(of_record("/store", "", made)))
    assert (event["job"]["name"], event["job"]["namespace"]) == (HOSTILE, "alignment")
    assert event["eventTime"].startswith("1970-01-01T")
