"""Held-out prompts that were trained on: counted by data set, reported, and refused above the limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.composition.graph import composing
from alignment_core.data.build import build, write
from alignment_core.data.pin import pin
from alignment_core.errors import DataError
from alignment_core.methods.nightly import compose_night
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import DataConfig, parse_recipe
from alignment_core.stages.overlap import OverlapConfig, run
from tests.flows.test_compositions import EVALUATION, GATES, MODEL, Composed

Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, kind: Any, data: Any) -> Path:
        if isinstance(data, list):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
            data = str(path)
        config = DataConfig.model_validate(data)
        write(build(config, [pin(source) for source in config.sources], byte_tokenizer(), kind, 0), tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    def run_stage(limit: float | None = None, **inputs: Path) -> dict[str, Any]:
        context: Any = SimpleNamespace(inputs=inputs, output=tmp_path)  # it uses nothing else of its run
        return run(context, OverlapConfig(field="evaluation.prompts", max_overlap=limit))

    return run_stage


PROMPTS = [{"prompt": f"p{i}"} for i in range(10)]


def test_prompts_are_found_in_rows_of_every_form(folder, compare):
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    answer = {"role": "assistant", "content": "a"}
    data = {
        "held_out": folder("held_out", "prompts", PROMPTS),
        "pairs": folder("pairs", "preferences", [{"prompt": "p1 ", "chosen": "a", "rejected": "b"}]),
        "texts": folder(
            "texts", "demonstrations", [{"prompt": "p2", "completion": "a"}, {"prompt": "other", "completion": "a"}]
        ),
        "chats": folder("chats", "demonstrations", [{"messages": [user("p3"), answer, user("p4"), answer]}]),
        "prompts": folder("prompts", "prompts", [{"messages": [user("p1")]}, {"messages": [user("p5"), answer]}]),
    }
    overlap = compare(**data)
    # p4 follows p3 and its answer: as a prompt by itself it has no answer.
    assert overlap["shared"] == {"chats": 1, "pairs": 1, "prompts": 2, "texts": 1}
    assert (overlap["overlap"], overlap["prompts"]) == (4, 10)  # p1, p2, p3, p5
    assert overlap["warnings"] == [
        "evaluation.prompts: 4 of 10 prompts are also trained on (1 in chats, 1 in pairs, 2 in prompts, 1 in texts)"
    ]


def test_more_overlap_than_allowed_is_refused_before_anything_is_trained(folder, compare):
    both = {
        "held_out": folder("held_out", "prompts", PROMPTS),
        "sft/data": folder("data", "demonstrations", [{"prompt": f"p{i}", "completion": "a"} for i in range(2)]),
    }
    assert compare(0.2, **both)["overlap"] == 2
    with pytest.raises(DataError, match=r"^evaluation\.prompts: 2 of 10 prompts are also trained on \(2 in sft/data\)"):
        compare(0.1, **both)


def test_no_overlap_lists_no_shared_prompts(folder, compare):
    train = folder("data", "demonstrations", [{"prompt": "else", "completion": "a"}])
    overlap = compare(0.0, held_out=folder("held_out", "prompts", PROMPTS), data=train)
    assert overlap == {"prompts": 10, "overlap": 0, "shared": {}}


def test_a_night_counts_the_prompts_of_all_nights_behind_production(folder, compare, store: Store, tmp_path):
    """Of the held-out prompts p1 was in the rows of Monday, p2 in those of Tuesday, and p3 is in tonight's. Production does
    not descend from the rows with p4, was not trained on the held-out prompt p5, and was copied without some of its data."""

    def published(name: str, kind: str, **inputs: Reference) -> Reference:
        draft = ProvenanceDraft(key=digest_of(name), stage="any", label=name, inputs=inputs)
        return store.publish(tmp_path / name, kind, draft)

    def trained(name: str, **inputs: Reference) -> Reference:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        return published(name, "model", **inputs)

    def pairs(prompt: str) -> list[dict[str, str]]:
        return [{"prompt": prompt, "chosen": "a", "rejected": "b"}]

    data = {}
    for name, prompt in (("monday", "p1"), ("tuesday", "p2"), ("refused", "p4"), ("best", "p5")):
        folder(name, "preferences", pairs(prompt))
        data[name] = published(name, "dataset")
    (tmp_path / "selected").mkdir()
    (tmp_path / "selected" / "train.parquet").write_text("pairs of completions, whose prompts are in another data set")
    others = {"selected": published("selected", "dataset"), "elsewhere": Reference("dataset", "9" * 64)}
    first = trained("first", data=data["monday"])
    production = trained("production", model=first, data=data["tuesday"], held_out=data["best"], **others)

    content: dict[str, Any] = {"method": "nightly", "name": "nights", "model": MODEL, "evaluation": EVALUATION}
    content |= {"promotion": GATES, "dpo": {"data": str(tmp_path / "arrives.jsonl")}}
    composed, batch = Composed(store), SimpleNamespace(label="batch")
    with composing(composed):
        compose_night(parse_recipe(content), production, batch, number=2)  # type: ignore[arg-type]
    monday, tuesday = data["monday"].short, data["tuesday"].short
    inputs = composed.inputs["evaluation/overlap"]
    assert inputs.keys() == {"held_out", "rows", monday, tuesday}

    folders = {role: store.fetch(value) for role, value in inputs.items() if isinstance(value, Reference)}
    folders |= {"held_out": folder("held_out", "prompts", PROMPTS), "rows": folder("rows", "preferences", pairs("p3"))}
    overlap = compare(**folders)
    assert (overlap["overlap"], overlap["shared"]) == (3, {"rows": 1, monday: 1, tuesday: 1})
    with pytest.raises(DataError, match=r"^evaluation\.prompts: 3 of 10 prompts are also trained on"):
        compare(0.2, **folders)


def test_splits_of_built_in_tasks_share_no_prompt_and_a_split_overlaps_itself(folder, compare):
    train = folder("data", "preferences", {"task": "mixed", "rows": 800})
    test = folder("held_out", "prompts", {"task": "mixed", "rows": 200, "split": "test"})
    assert compare(held_out=test, data=train)["overlap"] == 0
    again = folder("again", "prompts", {"task": "first", "rows": 200})
    drawn = folder("drawn", "demonstrations", {"task": "first", "rows": 8000})
    assert compare(held_out=again, data=drawn)["overlap"] > 0
