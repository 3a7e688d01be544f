"""Paths that a stage hands to actors, which may run on another machine.

Machines share nothing but the store. A path in the workspace of a store is unpickled on another machine as the same place in
the workspace there: an artifact is fetched into that machine's cache, and a folder to write into is created. Files that an
actor writes come back through the store (:func:`send`, :func:`receive`).
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PosixPath
from tempfile import NamedTemporaryFile
from typing import Any

from alignment_core.artifacts.manifest import FileEntry, entries_of, manifest_at
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import CACHE, PROGRESS
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import files_below, key_of_progress, remove_tree
from alignment_core.errors import EnvironmentFault, NotFound
from alignment_core.home import align_home
from alignment_core.processes import boot_id

_THREADS = 8
_uris: dict[Path, str] = {}
"""URIs of stores, by the root of their workspace."""
_stores: dict[str, Store] = {}
"""Open stores, by URI."""
_held = contextlib.ExitStack()
"""Fetched artifacts stay in the cache until this process, an actor, ends."""


class Placed(PosixPath):
    """A path in the workspace of a store, as are all paths that are derived from it. It is unpickled unchanged on the machine
    that it comes from, and wherever machines share the store's folder."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Path], tuple[str, ...]]:
        root = _root_of(self)
        return _arrive, (_uris[root], home_id(), str(root), self.relative_to(root).as_posix())


class Carried(Placed):
    """The path of a small file that is in no artifact: where its place is not shared, it is unpickled with its content."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Path], tuple[Any, ...]]:
        arrive, place = super().__reduce__()
        return (arrive, place) if _store_of(self).holds_workspace else (_unpack, (place, self.read_bytes()))


def carried(path: Path) -> Path:
    """A path in a store's workspace that takes its file along; any other path as it is."""
    return Carried(path) if isinstance(path, Placed) else path


def placed(store: Store, path: Path) -> Placed:
    """A path in the store's workspace as a path that can be sent to other machines."""
    _uris[store.workspace.root] = store.uri
    _stores.setdefault(store.uri, store)
    return Placed(path)


@cache
def home_id() -> str:
    """Id of this machine since its last boot and of its ``ALIGN_HOME``: with equal ids, equal paths are the same files."""
    with explained("access", align_home()):
        status = align_home().stat()
    return f"{boot_id()}-{status.st_dev:x}-{status.st_ino:x}"


def is_here(path: Path, home: str) -> bool:
    """Whether a path from the machine with this ``home_id`` is on a file system that this machine shares."""
    return home == home_id() or not isinstance(path, Placed) or _store_of(path).holds_workspace


def is_artifact(path: Path) -> bool:
    """Whether a path is in the cache of artifacts, so that it is fetched wherever it arrives."""
    return isinstance(path, Placed) and path.is_relative_to(_store_of(path).workspace.cache)


def send(folder: Path, home: str) -> tuple[FileEntry, ...] | None:
    """Move the files of a folder of this machine into the store, for the machine with this ``home_id``.

    Returns the entries for :func:`receive`, whose bytes the collector keeps for a while; None if that machine shares the
    folder.
    """
    if is_here(folder, home):
        return None
    if not folder.is_dir():
        return ()
    entries = _put_files(_store_of(folder), folder)
    remove_tree(folder)
    with contextlib.suppress(OSError):
        for parent in folder.parents:  # created when the path arrived; stops at the first that is not empty
            parent.rmdir()
    return entries


def share(folder: Path) -> tuple[FileEntry, ...]:
    """Copy the files of a folder of this machine into the store, for others to :func:`receive`."""
    return () if _store_of(folder).holds_workspace else _put_files(_store_of(folder), folder)


def _put_files(store: Store, folder: Path) -> tuple[FileEntry, ...]:
    """Put the files of a folder into the store as blobs, which nothing refers to yet."""
    with explained("read", folder):
        before = files_below(folder)
        files = entries_of(folder, before)
    with store.leases.publication({entry.sha256 for entry in files}, lasting=True):
        store.blobs.put_files(files, folder, before)
    return files


def receive(folder: Path, entries: Iterable[FileEntry], home: str | None = None) -> None:
    """Fetch files from the store into a folder of this machine, every byte verified; other files in it stay.

    Does nothing if this machine shares the folder with the machine with the ``home_id`` ``home``.
    """
    if home is not None and is_here(folder, home):
        return
    get_files(_store_of(folder), folder, entries, folder.name)


def get_files(store: Store, folder: Path, entries: Iterable[FileEntry], owner: str) -> None:
    """Fetch files from the store into a folder, in place of files of these names; errors name the ``owner`` of the files."""

    def fetch(entry: FileEntry) -> None:
        target = folder / entry.path
        with contextlib.suppress(FileNotFoundError):
            if store.blobs.problem(entry, target) is None:
                return
            target.unlink()
        store.blobs.get(owner, entry, target)

    with explained("write", folder):
        for entry in entries:
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch, entries))


def clear(folder: Path, home: str) -> None:
    """Remove the files of an earlier attempt from a folder that only this machine has."""
    if not is_here(folder, home):
        remove_tree(folder)


def _root_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent in _uris)


def _store_of(path: Path) -> Store:
    return _open(_uris[_root_of(path)])


def _arrive(uri: str, home: str, root: str, relative: str) -> Path:
    """The same path on this machine. Raises the errors of ``open_store`` and ``Store.fetch``."""
    if home == home_id():
        _uris[Path(root)] = uri
        return Placed(root, relative)
    store = _open(uri)
    kind, *parts = Path(relative).parts or ("",)
    if f"{kind}/" == CACHE and parts:
        return Placed(_fetched(uri, parts[0]), *parts[1:])
    path = Placed(store.workspace.root, relative)
    if not store.holds_workspace:
        if f"{kind}/" == PROGRESS and parts:
            store.workspace.progress(key_of_progress(parts[0]))
        with explained("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _unpack(place: tuple[str, ...], content: bytes) -> Path:
    path = _arrive(*place)
    if not path.exists():
        with explained("write", path), NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
            file.close()
            os.replace(file.name, path)  # others of this machine may write it, too
    return path


@cache
def _fetched(uri: str, digest: str) -> Path:
    """The artifact of this digest in the local cache, once for all paths in it: those of images come with every request."""
    store = _open(uri)
    try:
        manifest = manifest_at(store.backend, digest)
    except NotFound as error:
        if not store.holds_workspace:
            raise
        raise EnvironmentFault(
            f"the store {uri} of this run is a folder of another node, which {platform.node()} does not share: mount it "
            "here under the same path, or run with a store on S3 or the Hub"
        ) from error
    return store.fetch(manifest.reference, _held)


def _open(uri: str) -> Store:
    from alignment_core.artifacts.open import open_store

    if uri not in _stores:
        store = open_store(uri, writes=False)
        _uris[store.workspace.root] = uri
        _stores[uri] = store
    return _stores[uri]
