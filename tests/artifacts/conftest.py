"""Fixtures of the store's tests: small directories, a fresh store, and real child processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft

KEY = "a" * 64


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
def in_children() -> Callable[..., list[int]]:
    """``in_children(work, …)`` runs every function in its own forked process, at once; their exit codes."""

    def run(*works: Callable[[], object]) -> list[int]:
        children = []
        for work in works:
            child = os.fork()
            if child == 0:
                try:
                    work()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    return run
