"""Fixtures of the nights' tests: an inbox in a folder, a recipe that reads it, and models that cost nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.methods.nightly import NightlyRecipe

Row = dict[str, Any]


def pair(number: int, **columns: Any) -> Row:
    return {"prompt": f"prompt {number}", "chosen": "yes", "rejected": "no", **columns}


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
def drop(inbox: Path) -> Callable[..., None]:
    """``drop("file.jsonl", row, …)`` appends rows, or text as it is, to a file of the inbox."""

    def append(name: str, *rows: Row | str) -> None:
        (inbox / name).parent.mkdir(parents=True, exist_ok=True)
        with (inbox / name).open("a", encoding="utf-8") as file:
            file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)

    return append


@pytest.fixture
def recipe(inbox: Path) -> Callable[..., NightlyRecipe]:
    """A recipe over the inbox; ``recipe(min_rows=3)`` sets a field of `nightly`."""

    def make(path: str | None = None, **nightly: Any) -> NightlyRecipe:
        return NightlyRecipe.model_validate(
            {
                "name": "owl",
                "model": {"scratch": {}},
                "dpo": {"data": {"path": path or str(inbox)}},
                "nightly": {"min_rows": 1, **nightly},
                "evaluation": {"prompts": "prompts.jsonl", "verifier": "judge.py:score"},
                "promotion": {"gates": [{"metric": "accuracy", "min_gain": 0}]},
            }
        )

    return make


@pytest.fixture
def train(store: Store, tmp_path: Path) -> Callable[..., Reference]:
    """``train("a", data=batch, model=parent)`` publishes a stand-in for a model, with its provenance."""

    def publish(name: str, **inputs: Reference) -> Reference:
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(name)
        key = digest_of([name, {role: str(reference) for role, reference in inputs.items()}])
        return store.publish(folder, "model", ProvenanceDraft(key=key, stage="dpo", label=name, inputs=inputs))

    return publish
