"""Fixtures of the store's tests: small directories, a fresh store, and real child processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.artifacts.paths import BLOBS, LEASES, MANIFESTS, USES
from alignment_core.canonical import digest_of
from tests.processes import ended, in_child
from tests.servers.hub import ORGANISATION, HubServer

KEY = "a" * 64


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    server = HubServer(tmp_path_factory.mktemp("hub")).start()
    yield server
    server.end()


@pytest.fixture
def organisation(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An organisation on a Hub that the environment names; tests make repos of their own in it."""
    for name, value in hub_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return ORGANISATION


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write("name", {"file": "text"})`` makes a directory to publish."""

    def make(name: str, files: dict[str, str | bytes] | None = None) -> Path:
        directory = tmp_path / "inputs" / name
        for path, content in (files or {"config.json": "{}", "weights/part-0.bin": "zero"}).items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return directory

    return make


@pytest.fixture
def draft() -> Callable[..., ProvenanceDraft]:
    def make(key: str = KEY, **fields: object) -> ProvenanceDraft:
        return ProvenanceDraft.model_validate({"key": key, "stage": "sft", "label": "round-1/sft"} | fields)

    return make


@pytest.fixture
def make(write: Callable[..., Path], draft: Callable[..., ProvenanceDraft]) -> Callable[..., Reference]:
    """``make(store, "name")`` publishes an artifact with a record, made from others."""

    def publish(store: Store, name: str, *used: Reference, kind: str = "model") -> Reference:
        inputs = {f"input-{number}": reference for number, reference in enumerate(used)}
        return store.publish(write(name, {"file": name}), kind, draft(digest_of(name), label=name, inputs=inputs))

    return publish


def age(store: Store, days: float) -> None:
    """Let all blobs, manifests, uses and leases be so many days old."""
    earlier = time.time() - days * 86400
    for prefix in (BLOBS, MANIFESTS, USES, LEASES):
        for entry in store.backend.list(prefix):
            os.utime(Path(store.workspace.root, entry.path), (earlier, earlier))


def is_whole(store: Store, reference: Reference) -> bool:
    return all(store.blobs.is_intact(entry) for entry in store.manifest(reference).files)


@pytest.fixture
def in_children() -> Callable[..., list[int]]:
    """``in_children(work, …)`` runs every function in its own forked process, concurrently; returns their exit codes."""

    def run(*works: Callable[[], object]) -> list[int]:
        return [ended(child) for child in [in_child(work) for work in works]]

    return run
