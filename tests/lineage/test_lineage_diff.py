"""Comparing two artifacts: which of the things that made them differ, and by how much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, prune
from alignment_core.canonical import digest_of
from alignment_core.lineage import compare, diff_text

Publish = Callable[..., Reference]


@pytest.fixture
def publish(store: Store, tmp_path: Path) -> Publish:
    """Publish files; with ``config`` or other fields, as the output of a stage."""

    def make(files: dict[str, str], kind: str = "model", name: str = "", **fields: object) -> Reference:
        directory = tmp_path / digest_of([files, name])[:12]
        directory.mkdir(exist_ok=True)
        for path, content in files.items():
            (directory / path).write_text(content)
        if not fields:
            return store.publish(directory, kind)
        config, inputs = fields.get("config", {}), fields.get("inputs", {})
        parts = {"stage": "sft", "config": config, "inputs": {role: str(used) for role, used in inputs.items()}}  # type: ignore[attr-defined]
        draft = {"key": digest_of([parts, name]), "stage": "sft", "label": name, "key_parts": parts} | fields
        return store.publish(directory, kind, ProvenanceDraft.model_validate(draft))

    return make


def test_a_changed_setting_is_shown_with_the_resulting_differences(store, publish):
    old_rows, new_rows = publish({"rows": "old"}, "dataset"), publish({"rows": "new, more"}, "dataset")
    base = publish({"weights": "base"})
    a = publish(
        {"weights": "aa", "config.json": "{}", "only_a": "x"},
        name="night-1/sft",
        config={"training": {"learning_rate": 1e-5, "epochs": 1}},
        inputs={"model": base, "data": old_rows},
        metrics={"loss": 0.5, "by_task": {"sort": 0.25}, "note": "fine"},
        packages={"torch": "2.13.0", "ray": "2.60.0"},
        seconds=10.0,
        cost={"train_tokens": 100.0},
    )
    b = publish(
        {"weights": "bbbb", "config.json": "{}"},
        name="night-2/sft",
        config={"training": {"learning_rate": 2e-5, "epochs": 1}},
        inputs={"model": base, "data": new_rows},
        metrics={"loss": 0.25, "by_task": {"sort": 0.75}, "accuracy": 0.9},
        packages={"torch": "2.13.1", "ray": "2.60.0"},
        seconds=12.5,
        cost={"train_tokens": 150.0},
    )
    difference = compare(store, a, b)
    assert not difference.identical
    assert (difference.a.label, difference.b.label) == ("night-1/sft", "night-2/sft")
    assert difference.key == ["config.training.learning_rate: 1e-05 → 2e-05"]
    assert [(pair.name, pair.a, pair.b) for pair in difference.inputs] == [("data", str(old_rows), str(new_rows))]
    assert {pair.name: pair.difference for pair in difference.metrics} == {
        "loss": -0.25,
        "by_task.sort": 0.5,
        "note": None,
        "accuracy": None,
    }
    assert {pair.name: pair.difference for pair in difference.cost} == {"seconds": 2.5, "train_tokens": 50.0}
    assert [(pair.name, pair.a, pair.b) for pair in difference.packages] == [("torch", "2.13.0", "2.13.1")]
    assert [(change.path, change.size_a, change.size_b) for change in difference.files] == [
        ("only_a", 1, None),
        ("weights", 2, 4),
    ]
    json.loads(difference.model_dump_json())

    text = diff_text(difference)
    assert f"a  {a.short}  by night-1/sft (sft)" in text
    assert re.search(r"loss +0.5 → +0.25 +-0.25", text)
    assert f"data  {old_rows.short} → {new_rows.short}" in text
    assert "—" in text  # for entries missing on one side


def test_an_artifact_is_identical_to_itself(store, publish):
    a = publish({"weights": "a"}, name="sft", config={"x": 1}, metrics={"loss": 1.0})
    difference = compare(store, a, a)
    assert difference.identical
    assert difference.key == difference.inputs == difference.packages == difference.files == []
    assert "identical: the same bytes" in diff_text(difference)


def test_artifacts_made_outside_are_compared_by_their_files(store, publish):
    a, b = publish({"weights": "a"}), publish({"weights": "b"}, name="b", config={"x": 1}, metrics={"loss": 1.0})
    difference = compare(store, a, b)
    assert (difference.a.stage, difference.b.stage, difference.key) == ("", "sft", [])
    assert [change.path for change in difference.files] == ["weights"]
    assert "made outside: no record" in diff_text(difference)
    assert diff_text(compare(store, a, publish({"weights": "c"}))).count("made outside") == 2


def test_the_nearest_stages_that_made_the_same_bytes_are_compared(store, publish):
    near, far = {"lr": 1, "seed": 1}, {"lr": 9, "seed": 9}
    a = publish({"weights": "a"}, name="a", config=near)
    assert publish({"weights": "a"}, name="b", config=far) == a
    b = publish({"weights": "b"}, name="c", config={"lr": 2, "seed": 1})
    assert compare(store, a, b).key == ["config.lr: 1 → 2"]


def test_pruned_artifacts_can_be_compared(store, publish):
    a = publish({"rows": "a"}, "rollouts", name="a", config={"x": 1})
    b = publish({"rows": "b"}, "rollouts", name="b", config={"x": 2})
    prune(store, None, 0, delete=True)
    assert store.is_pruned(a)
    assert compare(store, a, b).key == ["config.x: 1 → 2"]


def test_upstream_changes_are_shown(store, publish):
    def chain(rows: int, name: str) -> Reference:
        data = publish({"rows": f"{rows}"}, "dataset", f"{name}data", label="sft/data", config={"data": {"rows": rows}})
        sft = publish({"weights": f"{rows}"}, name=f"{name}sft", label="sft", config={"x": 1}, inputs={"data": data})
        return publish(
            {"weights": f"dpo {rows}"}, name=f"{name}dpo", label="dpo", config={"x": 1}, inputs={"model": sft}
        )

    difference = compare(store, chain(100, "a"), chain(200, "b"))
    assert difference.key == []
    assert [(change.role, change.key) for change in difference.upstream] == [
        ("model.data", ["sft.data.rows: 100 → 200"])
    ]
    assert "model.data, by sft/data\n    sft.data.rows: 100 → 200" in diff_text(difference)


class Rounds:
    """Runs of SFT and rounds of DPO, each trained on pairs of its start's own completions."""

    def __init__(self, publish: Publish, beta: Mapping[int, float] = {}, prefix: str = "", rows: int = 1) -> None:
        self.publish, self.prefix = publish, prefix
        self.models = [self.stage("sft", "train_sft", config={"rows": rows})]
        for number in (1, 2, 3):
            start = self.models[-1]
            prompts = {"first_prompt": 8 * number}
            rollouts = self.stage(f"round-{number}/generate", "generate", "rollouts", prompts, policy=start)
            pairs = self.stage(f"round-{number}/select", "select_pairs", "dataset", rollouts=rollouts)
            config = {"beta": beta.get(number, 0.1)}
            self.models.append(self.stage(f"round-{number}/dpo", "train_dpo", config=config, model=start, data=pairs))

    def stage(
        self, label: str, stage: str, kind: str = "model", config: Mapping[str, object] = {}, **inputs: Reference
    ):
        label = f"{self.prefix}{label}"
        parts = {"stage": stage, "config": config, "inputs": {role: str(used) for role, used in inputs.items()}}
        content = digest_of([label, parts])
        made = {"stage": stage, "label": label, "key_parts": parts, "config": config, "inputs": inputs}
        return self.publish({"content": content}, kind, name=content, key=content, **made)


def test_rounds_of_a_run_are_compared_with_each_other_and_not_with_what_they_started_from(store, publish):
    sft, first, second, third = Rounds(publish, beta={2: 0.5}).models
    difference = compare(store, first, second)
    assert difference.relation == "b is one round further, b was made from a"
    assert difference.key == ["iterative_dpo.beta: 0.1 → 0.5"]
    assert [(pair.role, pair.a.label, pair.b.label, pair.key) for pair in difference.upstream] == [
        ("data.rollouts", "round-1/generate", "round-2/generate", ["the first prompt: 8 → 16"])
    ]
    assert "\nb is one round further, b was made from a\n" in diff_text(difference)
    assert compare(store, third, first).relation == "a is 2 rounds further, a was made from b"
    assert compare(store, sft, first).relation == "b was made from a"


def test_rounds_of_two_runs_are_compared_at_the_same_places(store, publish):
    one = Rounds(publish).models
    other = Rounds(publish, prefix="branch/", rows=2).models
    difference = compare(store, one[1], other[3])
    assert difference.relation == "b is 2 rounds further"
    assert [(pair.role, pair.a.label, pair.b.label, pair.key) for pair in difference.upstream] == [
        ("model", "sft", "branch/sft", ["config.rows: 1 → 2"]),
        ("data.rollouts", "round-1/generate", "branch/round-3/generate", ["config.first_prompt: 8 → 24"]),
    ]


def test_consecutive_nights_are_compared_without_all_nights_before_them(store, publish, monkeypatch):
    production = publish({"weights": "0"})
    models = []
    for night in range(1, 31):
        made = {"label": "night/dpo", "inputs": {"model": production}, "config": {"night": night}}
        production = publish({"weights": f"{night}"}, name=f"{night}", **made)
        models.append(production)
    listed = []
    listing = store.backend.list
    monkeypatch.setattr(type(store.backend), "list", lambda self, prefix: listed.append(prefix) or listing(prefix))
    difference = compare(store, models[-2], models[-1])
    assert (difference.relation, difference.upstream) == ("b was made from a", [])
    assert listed == ["stages/"], "one view answers everything"


def test_a_difference_in_hardware_is_shown_although_no_key_has_it(store, publish):
    a, b = (
        publish({"w": f"{ranks}"}, name=f"{ranks}", config={}, hardware={"cpu": "x86", "trainers": ranks})
        for ranks in (1, 2)
    )
    difference = compare(store, a, b)
    assert [(pair.name, pair.a, pair.b) for pair in difference.hardware] == [("trainers", 1, 2)]
    assert "hardware (not in the key; changes rounding)\n  trainers  1 → 2" in diff_text(difference)
