"""Retention: delete the bytes of artifacts that can be made again, and abandoned checkpoints; their metadata stays."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from alignment_core.artifacts import tags
from alignment_core.artifacts.gc import Garbage
from alignment_core.artifacts.manifest import Manifest
from alignment_core.artifacts.paths import PRUNED, blob_path, manifest_path, pruned_path
from alignment_core.artifacts.reference import PRUNABLE
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import entries, is_mine, time_and_size
from alignment_core.errors import UserError

DAY = 24 * 3600.0


def prune(
    store: Store,
    progress_days: float | None,
    rollouts_days: float | None,
    delete: bool = False,
    used: Collection[str] = (),
) -> list[Garbage]:
    """Find, and with ``delete`` remove, progress and rollouts that nobody used for so many days; None keeps them.

    What is ``used`` (keys and references as text, of runs that are alive) stays, whatever the clock says of its age.
    Progress goes as a whole, unless its stage runs right now. Rollouts and scores that no tag ever named lose their
    blobs and their cached copy; manifest and stage record stay, so that lineage and comparisons still work, and a
    marker says that the bytes went on purpose. Blobs that another artifact needs stay. Raises Corrupt when a tag cannot
    be read: what it keeps is then unknown.
    """
    found: list[Garbage] = []
    if progress_days is not None:
        found += _prune_progress(store, time.time() - progress_days * DAY, delete, used)
    if rollouts_days is not None:
        found += _prune_rollouts(store, time.time() - rollouts_days * DAY, delete, used)
    return found


def _prune_progress(store: Store, before: float, delete: bool, used: Collection[str]) -> list[Garbage]:
    workspace, found = store.workspace, []
    for tree in entries(workspace.all_progress):
        try:
            with workspace.held(tree.name) as held:
                newest, size = time_and_size(tree) if held else (before, 0)
                if not held or newest > before or tree.name in used:
                    continue
                found.append(Garbage(what="progress", path=tree.relative_to(workspace.root).as_posix(), size=size))
                if delete:
                    workspace.discard(tree)
        except UserError:
            continue  # not named as a stage key: none of ours
    return found


def _prune_rollouts(store: Store, before: float, delete: bool, used: Collection[str]) -> list[Garbage]:
    marked = {Path(stored.path).name for stored in store.backend.list(PRUNED)}
    manifests = list(store.artifacts())  # unreadable ones are left out: publishing them again brings all of their blobs
    tagged = {move.to for move in tags.all_moves(store.backend)}
    chosen, needed = [], set[str]()
    for manifest in manifests:
        free = manifest.reference not in tagged and str(manifest.reference) not in used
        prunable = manifest.kind in PRUNABLE and free
        if manifest.digest in marked or (prunable and _is_old(store, manifest, before)):
            chosen.append(manifest)
        else:
            needed |= {entry.sha256 for entry in manifest.files}
    found = []
    for manifest in chosen:
        if delete and not _marked_and_unused(store, manifest, before, manifest.digest in marked):
            continue
        blobs = {entry.sha256: entry.size for entry in manifest.files if entry.sha256 not in needed}
        size = sum(size for blob, size in blobs.items() if _drop(store, blob, before, delete))
        needed |= blobs.keys()  # told once
        if size or manifest.digest not in marked:
            found.append(Garbage(what=manifest.kind, path=str(manifest.reference), size=size))
        cached = store.workspace.cache / manifest.digest
        if delete and cached.exists() and is_mine(cached):
            store.workspace.discard(cached)
    return found


def _marked_and_unused(store: Store, manifest: Manifest, before: float, marked: bool) -> bool:
    """Mark an artifact, and look again whether nobody uses it.

    The mark comes first, so that whatever ends this process leaves either a whole artifact or a marked one. Who wants to
    use the artifact renews its manifest first and looks for the mark then (``Store.find``), so that one of the two sees
    the other. The mark is never taken back here, but by a publisher, who has put all of the blobs.
    """
    if not marked:
        store.backend.put_new(pruned_path(manifest.digest), b"pruned")
    return _is_old(store, manifest, before)


def _is_old(store: Store, manifest: Manifest, before: float) -> bool:
    stored = store.backend.stat(manifest_path(manifest.digest))
    return stored is not None and stored.modified <= before


def _drop(store: Store, blob: str, before: float, delete: bool) -> bool:
    """Whether a blob is there and goes; one that a publisher renewed meanwhile stays."""
    stored = store.backend.stat(blob_path(blob))
    if stored is None or stored.modified > before:
        return False
    return store.backend.delete(stored.path, unmodified_since=before) if delete else True
