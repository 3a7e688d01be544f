"""Stores of version 0.1: its manifests, records and tag moves are read, and are still written byte for byte as it read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, TagMove, collect, open_store
from alignment_core.artifacts.checksummed import seal
from alignment_core.artifacts.paths import blob_path, manifest_path, stage_path, tag_path

KEY = "a" * 64
FILES = {"config.json": "{}", "weights/part-0.bin": "zero"}
SHA256 = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in FILES.items()}
MANIFEST = (
    f'{{"files":[{{"path":"config.json","sha256":"{SHA256["config.json"]}","size":2}},'
    f'{{"path":"weights/part-0.bin","sha256":"{SHA256["weights/part-0.bin"]}","size":4}}],"kind":"model"}}'
).encode()
MODEL = Reference("model", hashlib.sha256(MANIFEST).hexdigest())
DATA = Reference("dataset", "b" * 64)
RECORD = f"""{{
  "key": "{KEY}",
  "stage": "sft",
  "label": "round-1/sft",
  "key_parts": {{
    "stage": "sft",
    "seed": 7
  }},
  "inputs": {{
    "data": "{DATA}"
  }},
  "accepted": {{}},
  "config": {{
    "lr": 1e-05,
    "note": "für"
  }},
  "seed": 7,
  "code_version": "0.1.0",
  "packages": {{
    "torch": "2.13.0"
  }},
  "hardware": {{}},
  "started_at": "2026-11-25T10:00:00.000+00:00",
  "finished_at": "2026-11-25T10:00:01.500+00:00",
  "seconds": 1.5,
  "cost": {{}},
  "metrics": {{
    "loss": 0.5,
    "bad": "Infinity"
  }},
  "run_ids": {{
    "prefect": "1"
  }},
  "outputs": {{
    "policy": "{MODEL}"
  }},
  "checksum": "1a065ba8800b7c27ced7a6ab845213c7d28fbb8afb8ca4fcd0714616c4e65b9e"
}}""".encode()
MOVE = f"""{{
  "name": "policy/production",
  "number": 1,
  "to": "{MODEL}",
  "previous": null,
  "reason": "first",
  "back_to": null,
  "at": "2026-11-26T01:46:55.716+00:00",
  "checksum": "f71a32e35aeb090cb9b57bdca2e775f1b43013f2a3002cc1490ce3252f140605"
}}""".encode()


@pytest.fixture
def draft() -> ProvenanceDraft:
    return ProvenanceDraft(
        key=KEY,
        stage="sft",
        label="round-1/sft",
        key_parts={"stage": "sft", "seed": 7},
        inputs={"data": DATA},
        config={"lr": 1e-5, "note": "für"},
        seed=7,
        code_version="0.1.0",
        packages={"torch": "2.13.0"},
        started_at="2026-11-25T10:00:00.000+00:00",
        finished_at="2026-11-25T10:00:01.500+00:00",
        seconds=1.5,
        metrics={"loss": 0.5, "bad": float("inf")},
        run_ids={"prefect": "1"},
    )


@pytest.fixture
def old(tmp_path: Path) -> Store:
    """A store with the objects that version 0.1 wrote for one stage and one tag."""
    store = open_store(tmp_path / "old")
    for path, text in FILES.items():
        store.backend.put(blob_path(SHA256[path]), text.encode())
    store.backend.put(manifest_path(MODEL.digest), MANIFEST)
    store.backend.put(stage_path(KEY), RECORD)
    store.backend.put(tag_path("policy/production", 1), MOVE)
    return store


def test_a_store_of_version_0_1_is_read(old: Store, draft: ProvenanceDraft) -> None:
    record = old.records.find(KEY)
    assert record is not None
    expected = draft.model_copy(update={"metrics": {"loss": 0.5, "bad": "Infinity"}})
    assert all(getattr(record, name) == getattr(expected, name) for name in ProvenanceDraft.model_fields)
    assert record.outputs == {"policy": MODEL}
    assert old.records.makers(MODEL) == [record]
    assert old.resolve("policy/production") == MODEL
    assert (old.fetch(MODEL) / "weights/part-0.bin").read_text() == "zero"
    assert collect(old, older_than=-1).garbage == ()


def test_records_manifests_and_moves_are_written_as_in_version_0_1(
    tmp_path: Path, write: Callable[..., Path], draft: ProvenanceDraft
) -> None:
    new = open_store(tmp_path / "new")
    assert new.publish_outputs({"policy": (write("model", FILES), "model")}, draft) == {"policy": MODEL}
    assert new.backend.read(manifest_path(MODEL.digest)) == MANIFEST
    assert new.backend.read(stage_path(KEY)) == RECORD
    at = "2026-11-26T01:46:55.716+00:00"
    assert seal(TagMove(name="policy/production", number=1, to=MODEL, previous=None, reason="first", at=at)) == MOVE
