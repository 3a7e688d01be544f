"""Tags and branches on the Hub mean the same in all attempts of a run, whatever they point to by then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment_core import journal
from alignment_core.artifacts import Reference, Store
from alignment_core.composition import steps
from alignment_core.composition.graph import composing
from alignment_core.composition.plan import Plan
from alignment_core.data import hub
from alignment_core.journal import Journal, RunRecord, new_record
from alignment_core.recipes import ModelConfig
from alignment_core.resolved_names import known_names, resolving

TAG = "policy/production"


def publish(store: Store, folder: Path, content: str) -> Reference:
    folder.mkdir()
    (folder / "config.json").write_text(content)
    return store.publish(folder, "model")


def resolved(store: Store, journal: Journal) -> tuple[object, str]:
    """What a tag and a branch on the Hub stand for in this attempt of a run."""
    with composing(Plan(store, 0)), resolving(journal.record.resolved, journal.resolved):
        return steps.base_model("model", ModelConfig(name=TAG)), hub.commit_of("org/rows", None, "dataset")


@pytest.mark.usefixtures("home")
def test_later_attempts_use_what_the_first_one_resolved(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(hub, "_commit_now", lambda *_: next(commits))
    first, second = publish(store, tmp_path / "1", "{}"), publish(store, tmp_path / "2", "[]")
    store.tags.move(TAG, first, None, "imported")
    with Journal(new_record("a1", "small", {}, store.uri)).open() as opened:
        assert resolved(store, opened) == (first, "a" * 40)
    store.tags.move(TAG, second, first, "promoted by this run")
    with Journal(new_record("a1", "small", {}, store.uri)).open() as again:  # as Prefect retries it
        assert resolved(store, again) == (first, "a" * 40)
    with resolving(journal.read("a1").resolved):  # as `align resume` does
        resumed = new_record("b2", "small", {}, store.uri, resolved=known_names())
    with Journal(resumed).open() as under_another_id:
        assert resolved(store, under_another_id) == (first, "a" * 40)
    with Journal(new_record("c3", "small", {}, store.uri)).open() as another_run:
        assert resolved(store, another_run) == (second, "b" * 40)


def test_a_record_of_an_earlier_version_is_read() -> None:
    content = json.loads(new_record("a1", "small", {}, "store").model_dump_json())
    del content["resolved"]
    assert RunRecord.model_validate(content).resolved == {}
