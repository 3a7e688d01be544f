"""Retention: delete the bytes of artifacts that can be made again, and abandoned checkpoints; their metadata stays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from alignment_core.artifacts.gc import Garbage, collector
from alignment_core.artifacts.leases import HeldLease
from alignment_core.artifacts.manifest import Manifest
from alignment_core.artifacts.paths import (
    PRUNED,
    SNAPSHOTS,
    blob_path,
    manifest_path,
    pruned_path,
    running_path,
    use_path,
)
from alignment_core.artifacts.reference import MASTERS, PRUNABLE, Reference
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.stored_progress import files_of
from alignment_core.artifacts.tag_history import TagMove
from alignment_core.artifacts.tag_history import before as move_before
from alignment_core.artifacts.workspace import entries, is_mine, key_of_progress, time_and_size
from alignment_core.errors import NotFound, UserError

DAY = 24 * 3600.0


def prune(
    store: Store,
    progress_days: float | None,
    rollouts_days: float | None,
    delete: bool = False,
    used: Collection[str] = (),
    cache_days: float | None = None,
    masters_days: float | None = None,
) -> list[Garbage]:
    """Find, and with ``delete`` remove, progress, rollouts, master weights and this machine's cached copies that were not used
    for the given days; None keeps them.

    Keys and references (as text) in ``used``, those of live runs, are kept, whatever the clock says of their age.
    Progress is deleted as a whole, unless its stage is running. Rollouts and scores that no tag ever named lose their
    blobs and their cached copy; manifest and stage record stay, so that lineage and comparisons still work, and a
    marker says that the bytes were deleted on purpose. The same applies to master weights, except those of policies to which a
    tag points now or would point after a rollback. Blobs that another artifact needs stay. Raises Corrupt when a tag, or the
    policy to which it points, cannot be read: the artifacts that it protects are then unknown.
    """
    pruned: list[Garbage] = []
    if cache_days is not None:
        pruned += _prune_cache(store, time.time() - cache_days * DAY, delete)
    if progress_days is not None:
        pruned += _prune_progress(store, time.time() - progress_days * DAY, delete, used)
        pruned += _prune_snapshots(store, store.backend.now() - progress_days * DAY, delete, used)
    days = {kind: masters_days if kind == MASTERS else rollouts_days for kind in PRUNABLE}
    before = {kind: store.backend.now() - value * DAY for kind, value in days.items() if value is not None}
    if before:
        with contextlib.ExitStack() as stack:
            lease = None
            if delete and _prunable(store, before):
                lease, freed = stack.enter_context(collector(store))
                pruned += freed
            pruned += _prune_artifacts(store, before, lease, used)
    return pruned


def _prunable(store: Store, kinds: Collection[str]) -> bool:
    """Whether the store has an artifact of these kinds: otherwise publishers need not wait for the collector's lease."""
    return any(manifest.kind in kinds for manifest in store.artifacts())


def _prune_cache(store: Store, before: float, delete: bool) -> list[Garbage]:
    """Cached copies of artifacts; the next use copies or fetches them again. Hard links free nothing and stay."""
    pruned = []
    for tree in entries(store.workspace.cache):
        with contextlib.suppress(FileNotFoundError):
            _, size = time_and_size(tree)
            if not size or not is_mine(tree) or tree.lstat().st_mtime > before:  # each use renews the time
                continue
            if not delete or store.cache.evict(tree.name):
                pruned.append(Garbage(what="cache", path=tree.relative_to(store.workspace.root).as_posix(), size=size))
    return pruned


def _prune_progress(store: Store, before: float, delete: bool, used: Collection[str]) -> list[Garbage]:
    workspace = store.workspace
    pruned = []
    for tree in entries(workspace.all_progress):
        try:
            with workspace.try_claim(tree.name) as free:
                newest, size = time_and_size(tree) if free else (before, 0)
                if not free or newest > before or key_of_progress(tree.name) in used:
                    continue
                pruned.append(Garbage(what="progress", path=tree.relative_to(workspace.root).as_posix(), size=size))
                if delete:
                    workspace.discard(tree)
        except UserError:
            continue  # its name is no stage key
    return pruned


def _prune_snapshots(store: Store, before: float, delete: bool, used: Collection[str]) -> list[Garbage]:
    """Snapshots of progress that were not pushed since ``before``; the next collection deletes their blobs."""
    pruned = []
    for stored in store.backend.list(SNAPSHOTS):
        key = Path(stored.path).stem
        if stored.modified <= before and key not in used and store.leases.holder(running_path(key)) is None:
            pruned.append(Garbage(what="snapshot", path=stored.path, size=stored.size))
            if delete:
                store.backend.delete(stored.path)
    return pruned


def _prune_artifacts(
    store: Store, before: Mapping[str, float], lease: HeldLease | None, used: Collection[str]
) -> list[Garbage]:
    """Prune artifacts that were not used since the time ``before`` of their kind. Deletes only with the collector's lease."""
    leased, _ = store.leases.protected(min(before.values()))
    marked = {Path(stored.path).name for stored in store.backend.list(PRUNED)}
    manifests = list(store.artifacts())  # unreadable ones are left out: publishing them again brings all of their blobs
    moves = list(store.tags.moves())
    tagged = {move.to for move in moves} | _masters_of_tagged(store, moves)
    chosen = []
    needed = set[str]()
    for manifest in manifests:
        is_free = (
            manifest.reference not in tagged and str(manifest.reference) not in used and manifest.digest not in leased
        )
        prunable = manifest.kind in before and is_free
        if (manifest.digest in marked and manifest.digest not in leased) or (
            prunable and _is_old(store, manifest, before[manifest.kind])
        ):
            chosen.append(manifest)
        else:
            needed |= {entry.sha256 for entry in manifest.files}
    needed |= leased
    for stored in store.backend.list(SNAPSHOTS):
        needed |= {entry.sha256 for entry in files_of(store, stored.path)}
    pruned = []
    delete = lease is not None
    for manifest in chosen:
        is_marked = manifest.digest in marked
        if delete and not _marked_and_unused(
            store, manifest, before.get(manifest.kind, min(before.values())), is_marked
        ):
            continue
        blobs = {entry.sha256: entry.size for entry in manifest.files if entry.sha256 not in needed}
        size = sum(size for blob, size in blobs.items() if _drop(store, blob, lease))
        needed |= blobs.keys()  # count a shared blob once
        if size or manifest.digest not in marked:
            pruned.append(Garbage(what=manifest.kind, path=str(manifest.reference), size=size))
        cached = store.workspace.cache / manifest.digest
        if delete and cached.exists() and is_mine(cached):
            store.cache.evict(manifest.digest)
    return pruned


def _masters_of_tagged(store: Store, moves: Iterable[TagMove]) -> set[Reference]:
    """The master weights that policies name to which a tag points now, or would point after a rollback."""
    histories: dict[str, list[TagMove]] = {}
    for move in moves:
        histories.setdefault(move.name, []).append(move)
    kept = {move.to for history in histories.values() for move in (history[-1], move_before(history)) if move}
    named = set[Reference]()
    for policy in kept:
        with contextlib.suppress(NotFound):  # a policy that is lost has to be made again, with its master weights
            if masters := store.masters_of(store.manifest(policy)):
                named.add(masters)
    return named


def _marked_and_unused(store: Store, manifest: Manifest, before: float, marked: bool) -> bool:
    """Mark an artifact, then check again that it was not used.

    The mark comes first, so that a killed pruner leaves either a whole artifact or a marked one. A reader notes its use first
    and checks for the mark second (``Records.find``), so that at least one of the two sees the other. Only a publisher removes
    a mark, after it has put all of the blobs.
    """
    if not marked:
        store.backend.put(pruned_path(manifest.digest), b"pruned")
    return _is_old(store, manifest, before)


def _is_old(store: Store, manifest: Manifest, before: float) -> bool:
    """Whether an artifact was neither published nor used since ``before``."""
    published = store.backend.stat(manifest_path(manifest.digest))
    use = store.backend.stat(use_path(manifest.digest))
    return published is not None and published.modified <= before and (use is None or use.modified <= before)


def _drop(store: Store, blob: str, lease: HeldLease | None) -> bool:
    """Whether a blob exists; it is deleted if the collector's lease is held."""
    if store.backend.stat(blob_path(blob)) is None:
        return False
    if lease is not None:
        lease.check()
        store.backend.delete(blob_path(blob))
    return True
