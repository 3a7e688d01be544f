"""``align store``: the default store, and the checks of its server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment_core.artifacts import Store, open_store
from alignment_core.doctor import storage
from alignment_core.doctor.environment import store_probe
from tests.align import align_here


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_working_store_passes_and_nothing_of_the_check_stays(
    kind: str, home: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_THROUGHPUT_BYTES", 1 << 20)
    where = tmp_path / "store" if kind == "folder" else f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}"
    store = open_store(where)
    report = storage.examine_storage(store)
    assert report.sound
    assert set(report.latency_ms) == {"write", "read", "look", "list"}
    assert min(report.mib_per_second.values()) > 0
    assert abs(report.clock_seconds) < 60
    assert [stored.path for stored in store.backend.list("")] == ["format.json"]
    assert kind == "s3" or not any((tmp_path / "store" / "tmp").iterdir())


def test_storage_that_overwrites_is_detected(store: Store, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    put = store.backend.put

    def overwrites(path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        """As a server that ignores conditions."""
        store.backend.delete(path)
        return put(path, source)

    monkeypatch.setattr(store.backend, "put", overwrites)
    monkeypatch.setattr(storage, "_THROUGHPUT_BYTES", 1024)
    report = storage.examine_storage(store)
    assert [promise.name for promise in report.promises if not promise.kept] == [
        "refuses to create one that exists",
        "refuses to replace another version than the one that was read",
    ]


def test_a_chosen_store_serves_all_commands_until_another_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALIGN_STORE", raising=False)

    def used(*arguments: str) -> dict[str, str]:
        return json.loads(align_here(home, "store", "use", *arguments, "--json").stdout)

    assert used() == {"store": str(home / "store"), "chosen_by": "default"}
    chosen = str(tmp_path / "elsewhere")
    assert used(chosen) == {"store": chosen, "chosen_by": "align store use"}
    assert open_store().uri == chosen
    assert json.loads(align_here(home, "store", "doctor", "--json").stdout)["store"] == chosen
    monkeypatch.setenv("ALIGN_STORE", str(tmp_path / "third"))
    assert used()["chosen_by"] == "ALIGN_STORE"
    assert open_store().uri == str(tmp_path / "third")
    monkeypatch.delenv("ALIGN_STORE")
    assert used("--default")["store"] == str(home / "store")


def test_a_store_that_cannot_be_used_is_not_chosen(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = align_here(home, "store", "use", str(tmp_path / "file"), "--json")
    assert refused.returncode == 2
    assert "a store is a folder" in refused.stdout + refused.stderr
    assert not (home / "default-store").exists()


def test_the_store_check_names_the_guarantee_that_the_storage_lacks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store.backend), "list", lambda backend, prefix: iter(()))
    state, sentence = store_probe(store.uri)
    assert state == "failed"
    assert sentence == f"{store.uri} cannot hold a store, which needs storage that lists what was just written"
