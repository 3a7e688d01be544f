"""Garbage collection: find, and on request delete, what no tag and no stage record reaches."""

from __future__ import annotations

import math
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts import tags
from alignment_core.artifacts.paths import BLOBS, MANIFESTS, PRUNED, STAGES, SUSPECTS, blob_path, stage_path
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import abandoned, entries, is_mine, time_and_size
from alignment_core.errors import Corrupt, NotFound, UserError

_CLOCK_OF_FILES = 5
"""CLOCK_REALTIME_COARSE, linux/time.h: what the kernel dates files by. It runs some milliseconds behind the others."""


class Garbage(BaseModel):
    """One thing that nothing refers to."""

    model_config = ConfigDict(frozen=True)

    what: str = Field(description="blob, manifest, suspicion, mark, cache, progress, temporary, or a pruned kind")
    path: str = Field(description="path inside the store, or inside its local side; of what is pruned, the reference")
    size: int = Field(description="bytes that deleting it frees")


class GcReport(BaseModel):
    """What a collection found, or deleted."""

    model_config = ConfigDict(frozen=True)

    deleted: bool = Field(description="whether the garbage was deleted; otherwise this was a dry run")
    garbage: tuple[Garbage, ...] = Field(description="what was found, or deleted")
    kept: int = Field(description="number of artifacts that stay")

    @property
    def size(self) -> int:
        """Bytes of all the garbage together."""
        return sum(item.size for item in self.garbage)

    def of(self, what: str) -> list[str]:
        """The paths of one sort of garbage."""
        return [item.path for item in self.garbage if item.what == what]

    def __str__(self) -> str:
        verb = "deleted" if self.deleted else "would delete"
        return f"{verb} {len(self.garbage)} objects, {self.size / 2**20:.1f} MiB; {self.kept} artifacts stay"


def collect(store: Store, delete: bool = False, older_than: float = 3600.0) -> GcReport:
    """Collect what is unreachable and was not modified for ``older_than`` seconds.

    Roots are the stage records (their outputs and inputs) and every move of every tag. Publishers may work at the same
    time: what those of this machine put or renew since they began stays, however young ``older_than`` lets things go;
    for those of other machines it has to be longer than a publication takes. ``Backend.delete`` looks at the time again
    when it deletes. Raises Corrupt, and deletes nothing, when a root or the manifest of a root cannot be
    read: what it keeps alive is then unknown.
    """
    now = time.clock_gettime(_CLOCK_OF_FILES)
    before = math.nextafter(min(now - older_than, store.workspace.published_since()), 0.0)
    collection = _Collection(store, delete, before)
    collection.artifacts()
    collection.local_trees()
    return GcReport(deleted=delete, garbage=tuple(collection.garbage), kept=collection.kept)


class _Collection:
    def __init__(self, store: Store, delete: bool, before: float) -> None:
        self.store, self.delete, self.before = store, delete, before
        self.garbage: list[Garbage] = []
        self.kept = 0
        self.kept_digests: set[str] = set()

    def artifacts(self) -> None:
        # Candidates are listed before the roots are read: what is published meanwhile is not among them.
        backend = self.store.backend
        manifests, blobs, suspects, marks = (
            list(backend.list(prefix)) for prefix in (MANIFESTS, BLOBS, SUSPECTS, PRUNED)
        )
        roots = self._roots()
        kept_blobs: set[str] = set()
        orphans = []
        for found in manifests:
            digest = Path(found.path).stem
            if digest in roots or found.modified > self.before:
                self._keep(digest, kept_blobs, must_read=digest in roots)
            else:
                orphans.append(found)
        for found in orphans:  # manifests go first, so that none ever refers to a blob that is gone
            if not self._collect("manifest", found.path, found.size):
                self._keep(Path(found.path).stem, kept_blobs, must_read=False)  # reused just now
        present = {found.path for found in blobs}
        for found in blobs:
            garbage = found.path not in kept_blobs and found.modified <= self.before
            if garbage and self._collect("blob", found.path, found.size):
                present.remove(found.path)
        for found in suspects:
            if blob_path(Path(found.path).name) not in present and found.modified <= self.before:
                self._collect("suspicion", found.path, found.size)
        for found in marks:
            if Path(found.path).name not in self.kept_digests and found.modified <= self.before:
                self._collect("mark", found.path, found.size)

    def local_trees(self) -> None:
        """Caches of artifacts that are gone, progress of finished stages, leftovers of crashed processes."""
        workspace = self.store.workspace
        for tree in entries(workspace.cache):
            if tree.name not in self.kept_digests:
                self._collect_tree("cache", tree)
        for tree in entries(workspace.all_progress):
            if self._is_finished(tree.name):
                with workspace.held(tree.name) as free:
                    if free:
                        self._collect_tree("progress", tree)
        for tree in entries(workspace.temporary):
            with abandoned(tree) as free:
                if free:
                    self._collect_tree("temporary", tree)

    def _roots(self) -> set[str]:
        references = {move.to for move in tags.all_moves(self.store.backend)}
        for found in self.store.backend.list(STAGES):
            record = self.store.record_at(found.path)
            references |= {*record.outputs.values(), *record.inputs.values()}
        return {reference.digest for reference in references}

    def _keep(self, digest: str, kept_blobs: set[str], must_read: bool) -> None:
        self.kept += 1
        self.kept_digests.add(digest)
        try:
            kept_blobs |= {blob_path(entry.sha256) for entry in self.store.manifest_at(digest).files}
        except (Corrupt, NotFound):
            if must_read:
                raise

    def _is_finished(self, name: str) -> bool:
        try:
            record = self.store.find(name) if self.store.backend.stat(stage_path(name)) is not None else None
            return record is not None and not any(map(self.store.is_pruned, record.outputs.values()))
        except UserError:
            return False

    def _collect(self, what: str, path: str, size: int) -> bool:
        if self.delete and not self.store.backend.delete(path, unmodified_since=self.before):
            return False
        self.garbage.append(Garbage(what=what, path=path, size=size))
        return True

    def _collect_tree(self, what: str, tree: Path) -> None:
        try:
            if not is_mine(tree):
                return
            newest, size = time_and_size(tree)
        except FileNotFoundError:
            return
        if newest > self.before:
            return
        self.garbage.append(Garbage(what=what, path=tree.relative_to(self.store.workspace.root).as_posix(), size=size))
        if self.delete:
            self.store.workspace.discard(tree)
