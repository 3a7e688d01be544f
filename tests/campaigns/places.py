"""The store of a campaign (in a folder, or in a bucket of its own server), and the outcome."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from alignment_core.artifacts import Backend, ProvenanceDraft, Store
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.open import check_backend
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.artifacts.workspace import Workspace
from tests.servers.s3 import S3Server


@dataclass(frozen=True)
class Outcome:
    """One line with a figure, and whether it is as good as it should be."""

    line: str
    is_met: bool


@dataclass(frozen=True)
class Place:
    """Room for stores, and local folders."""

    kind: str
    folder: Path
    server: S3Server | None

    def backend(self) -> Backend:
        """Of a store that is new and empty."""
        name = uuid.uuid4().hex
        folder = self.folder / "stores" / name
        backend = FolderBackend(folder) if self.server is None else S3Backend("bucket", f"{name}/")
        check_backend(backend)
        return backend

    def store(self, backend: Backend) -> Store:
        """A store as another machine would see it: nothing local is there yet."""
        return Store(backend, Workspace(self.folder / "machines" / uuid.uuid4().hex))

    def write(self, files: dict[str, bytes]) -> Path:
        """A directory to publish."""
        directory = self.folder / "inputs" / uuid.uuid4().hex
        for path, content in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        return directory


Campaign = Callable[[Place, int, int], Outcome]
"""The function ``run`` of each module of this package: with a place, a count and a seed."""


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    """A place of a kind, ``folder`` or ``s3``, that the environment of this process names."""
    (folder / "home").mkdir(parents=True)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"ALIGN_HOME": str(folder / "home")}))
        server = None
        if kind == "s3":
            server = S3Server(folder / "server").start()
            stack.callback(server.end, signal.SIGKILL)
            server.make_bucket("bucket")
            stack.enter_context(patch.dict(os.environ, server.environment()))
            S3Backend("bucket", "").put(
                "first", b""
            )  # the server keeps a bucket over its death once something is in it
        yield Place(kind, folder, server)


def draft(key: str, **fields: object) -> ProvenanceDraft:
    """The provenance of a stage."""
    return ProvenanceDraft.model_validate({"key": key, "stage": "sft", "label": "round-1/sft"} | fields)


def outcome(name: str, place: Place, count: int, seed: int, bad: int, description: str, **more: object) -> Outcome:
    """The usual figure: how many of so many went wrong, where none should."""
    figures = {"campaign": name, "store": place.kind, "seed": seed, "of": count, description: bad} | more
    return Outcome(json.dumps(figures), bad == 0)
