"""Garbage collection: find, and optionally delete, objects that no tag and no stage record reaches."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.folder import CLOCK_OF_FILES
from alignment_core.artifacts.leases import HeldLease
from alignment_core.artifacts.manifest import manifest_at
from alignment_core.artifacts.paths import (
    ATTACHMENTS,
    BLOBS,
    COLLECTOR,
    FORMAT,
    MANIFESTS,
    PRUNED,
    SNAPSHOTS,
    STAGES,
    SUSPECTS,
    USES,
    blob_path,
    stage_path,
)
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.stored_progress import files_of
from alignment_core.artifacts.workspace import abandoned, entries, is_mine, key_of_progress, time_and_size
from alignment_core.errors import Corrupt, EnvironmentFault, NotFound, UserError

_TREES = ("cache", "progress", "temporary")


class Garbage(BaseModel):
    """An unreferenced object or directory."""

    model_config = ConfigDict(frozen=True)

    what: str = Field(
        description="blob, manifest, suspicion (the note of a corrupt blob), mark (of a pruned artifact), use (the note of an "
        "artifact's last use), attachment, upload, snapshot, cache, progress, temporary, or a pruned kind"
    )
    path: str = Field(description="path inside the store or its workspace; the reference of a pruned artifact")
    size: int = Field(description="bytes that deleting it frees")


class GcReport(BaseModel):
    """The garbage of a collection."""

    model_config = ConfigDict(frozen=True)

    deleted: bool = Field(description="whether the garbage was deleted; otherwise this was a dry run")
    garbage: tuple[Garbage, ...] = Field(description="the garbage")
    kept: int = Field(description="number of artifacts that stay")

    @property
    def size(self) -> int:
        """Bytes of all the garbage together."""
        return sum(item.size for item in self.garbage)

    def of(self, what: str) -> list[str]:
        """The paths of one kind of garbage."""
        return [item.path for item in self.garbage if item.what == what]

    def __str__(self) -> str:
        verb = "deleted" if self.deleted else "would delete"
        return f"{verb} {len(self.garbage)} objects, {self.size / 2**20:.1f} MiB; {self.kept} artifacts stay"


def collect(store: Store, delete: bool = False, older_than: float = 3600.0) -> GcReport:
    """Collect unreachable objects that were last put more than ``older_than`` seconds ago by the store's clock.

    Roots are the stage records (their outputs, inputs and descriptions), every move of every tag, snapshots of the progress of
    stages that are not finished, and leases of publications, which protect objects of any age. Publishers may continue, but
    one that begins during a deletion waits for its end. The next collection finishes an interrupted one. Raises Corrupt, and
    deletes nothing, when a root or the manifest of a root cannot be read: the objects that it protects are then unknown. A
    snapshot that cannot be read protects nothing, because no stage can resume from it.
    """
    if not delete or store.backend.stat(FORMAT) is None:  # a missing store is not created for a collection
        return _Collection(store, None, older_than).run(delete)
    with collector(store, older_than) as (lease, freed):
        report = _Collection(store, lease, older_than).run(delete)
        return report.model_copy(update={"garbage": (*freed, *report.garbage)})


@contextlib.contextmanager
def collector(store: Store, older_than: float = 3600.0) -> Iterator[tuple[HeldLease, list[Garbage]]]:
    """Hold the collector's lease, which excludes other collectors and makes new publishers wait.

    Yields the lease, and the garbage that was deleted before because the disk was too full for a lease.
    """
    with contextlib.ExitStack() as stack:
        freed: list[Garbage] = []
        try:
            lease = stack.enter_context(store.leases.hold(COLLECTOR))
        except EnvironmentFault:
            freed = _make_room(store, older_than)
            lease = stack.enter_context(store.leases.hold(COLLECTOR))
        yield lease, freed


def _make_room(store: Store, older_than: float) -> list[Garbage]:
    """Delete garbage, one object after the other, until a lease fits onto the disk. Until then publishers cannot write a lease
    either, so none of them can begin to rely on a deleted object."""
    collection = _Collection(store, None, older_than)
    collection.run(delete=True)
    trees = [item for item in collection.garbage if item.what in _TREES]
    objects = [item for item in collection.garbage if item.what not in _TREES]
    for number, item in enumerate(objects):
        with contextlib.suppress(EnvironmentFault), store.leases.hold(COLLECTOR):
            return trees + objects[:number]
        store.backend.delete(item.path)
    return trees + objects


class _Collection:
    """One pass over a store. It deletes objects only with the collector's lease."""

    def __init__(self, store: Store, lease: HeldLease | None, older_than: float) -> None:
        self.store = store
        self.lease = lease
        self.before = math.nextafter(store.backend.now() - older_than, 0.0)
        self.before_here = math.nextafter(time.clock_gettime(CLOCK_OF_FILES) - older_than, 0.0)
        self.leased, self.expired_leases = store.leases.protected(self.before)
        self.garbage: list[Garbage] = []
        self.kept = 0
        self.kept_digests: set[str] = set()

    def run(self, delete: bool) -> GcReport:
        self.artifacts()
        self.local_trees(delete)
        return GcReport(deleted=delete, garbage=tuple(self.garbage), kept=self.kept)

    def artifacts(self) -> None:
        backend = self.store.backend
        manifests, blobs, suspects, marks, uses, attachments = (
            list(backend.list(prefix)) for prefix in (MANIFESTS, BLOBS, SUSPECTS, PRUNED, USES, ATTACHMENTS)
        )
        roots = self._roots()
        kept_blobs: set[str] = set()
        orphans = []
        for stored in manifests:
            digest = Path(stored.path).stem
            if digest in roots or digest in self.leased or stored.modified > self.before:
                self._keep(digest, kept_blobs, must_read=digest in roots)
            else:
                orphans.append(stored)
        for stored in orphans:  # manifests first: a kill in between must not leave one that refers to a deleted blob
            self._collect("manifest", stored)
        for stored in list(backend.list(SNAPSHOTS)):
            if not (self._is_finished(Path(stored.path).stem) and self._collect("snapshot", stored)):
                kept_blobs |= {blob_path(entry.sha256) for entry in files_of(self.store, stored.path)}
        present = {stored.path for stored in blobs}
        for stored in blobs:
            is_needed = stored.path in kept_blobs or Path(stored.path).name in self.leased
            if not is_needed and self._collect("blob", stored):
                present.remove(stored.path)
        for stored in suspects:
            if blob_path(Path(stored.path).name) not in present:
                self._collect("suspicion", stored)
        for what, listed in (("mark", marks), ("use", uses), ("attachment", attachments)):
            for stored in listed:
                if Path(stored.path).parts[1] not in self.kept_digests | self.leased:
                    self._collect(what, stored)
        for stored in self.expired_leases if self.lease is not None else ():
            backend.delete(stored.path, stored.version)  # expired leases are not reported as garbage
        for stored in backend.unfinished():
            if stored.modified <= self.before and Path(stored.path).name not in self.leased:
                self._note("upload", stored)
                if self.lease is not None:
                    backend.drop(stored)

    def local_trees(self, delete: bool) -> None:
        """Caches of artifacts that are gone, progress of finished stages, leftovers of crashed processes."""
        workspace = self.store.workspace
        for tree in entries(workspace.cache):
            if tree.name not in self.kept_digests:
                self._collect_tree("cache", tree, delete, lambda tree: self.store.cache.evict(tree.name))
        for tree in entries(workspace.all_progress):
            if self._is_finished(key_of_progress(tree.name)):
                with workspace.try_claim(tree.name) as free:
                    if free:
                        self._collect_tree("progress", tree, delete)
        for tree in entries(workspace.temporary):
            with abandoned(tree) as free:
                if free:
                    self._collect_tree("temporary", tree, delete)

    def _roots(self) -> set[str]:
        references = {move.to for move in self.store.tags.moves()}
        for stored in self.store.backend.list(STAGES):
            references |= self.store.records.read(stored.path).references
        return {reference.digest for reference in references}

    def _keep(self, digest: str, kept_blobs: set[str], must_read: bool) -> None:
        self.kept += 1
        self.kept_digests.add(digest)
        try:
            kept_blobs |= {blob_path(entry.sha256) for entry in manifest_at(self.store.backend, digest).files}
        except (Corrupt, NotFound):
            if must_read:
                raise

    def _is_finished(self, key: str) -> bool:
        try:
            record = self.store.records.find(key) if self.store.backend.stat(stage_path(key)) is not None else None
            return record is not None and not any(map(self.store.is_pruned, record.outputs.values()))
        except UserError:
            return False

    def _collect(self, what: str, stored: Object) -> bool:
        """Collect an unreferenced object; False if it is too young."""
        if stored.modified > self.before:
            return False
        self._note(what, stored)
        if self.lease is not None:
            self.lease.check()  # without the lease a publisher may begin to rely on the object right now
            self.store.backend.delete(stored.path)
        return True

    def _note(self, what: str, stored: Object) -> None:
        self.garbage.append(Garbage(what=what, path=stored.path, size=stored.size))

    def _collect_tree(
        self, what: str, tree: Path, delete: bool, remove: Callable[[Path], bool | None] | None = None
    ) -> None:
        """Collect a directory of the workspace, unless ``remove`` returns False because the tree is in use."""
        try:
            if not is_mine(tree):
                return
            newest, size = time_and_size(tree)
        except FileNotFoundError:
            return
        if newest > self.before_here:
            return
        if delete and (remove or self.store.workspace.discard)(tree) is False:
            return
        self.garbage.append(Garbage(what=what, path=tree.relative_to(self.store.workspace.root).as_posix(), size=size))
