"""On a disk without a free byte or name, commands can still read everything, and free space."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alignment.flows.cli.main import app
from alignment_core.artifacts import ProvenanceDraft, Store, open_store
from alignment_core.journal import Journal, new_record
from tests.conftest import fill

KEY = "a" * 64
TAG = "policy/production"
LOOK = [
    ["artifacts", "ls"],
    ["artifacts", "show", TAG],
    ["artifacts", "verify"],
    ["artifacts", "gc"],
    ["tags", "ls"],
    ["tags", "history", TAG],
    ["lineage", TAG],
    ["diff", TAG, TAG],
    ["explain", "last"],
    ["down"],
]


@pytest.fixture
def store(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a model, and with 0.5 MiB that nothing needs; its disk is full."""
    monkeypatch.setenv("ALIGN_HOME", str(small_disk))
    store = open_store()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"trained")
    model = store.publish(tmp_path / "model", "model", ProvenanceDraft(key=KEY, stage="sft", label="sft"))
    store.tags.move(TAG, model, None, "first")
    for number in range(16):
        (tmp_path / "model" / str(number)).write_bytes(os.urandom(1 << 15))
    store.publish(tmp_path / "model", "model")
    with Journal(new_record("abc", "small", {}, store.uri)).open() as journal:
        journal.stage("sft", "run", stage="sft", key=KEY, key_parts={})
    fill(small_disk)
    return store


def test_reading_commands_and_gc_work_on_a_full_disk(store: Store, tmp_path: Path) -> None:
    run = CliRunner()
    for command in LOOK:
        done = run.invoke(app, command)
        assert done.exit_code == 0, f"{command}: {done.output} {done.exception}"
    assert run.invoke(app, ["status"]).exit_code == 3, "no services run"

    done = run.invoke(app, ["artifacts", "gc", "--delete", "--older-than", "0"])
    assert done.output == "deleted 17 objects, 0.5 MiB; 1 artifacts stay\n"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "weights").write_bytes(os.urandom(1 << 18))
    assert store.verify(store.publish(tmp_path / "again", "model")) == []
