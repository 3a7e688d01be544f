"""In-stage progress in the store: a stage whose machine is lost resumes on another one from its last snapshot.

A snapshot lists the files of a stage's progress folder, whose bytes are blobs, so that each push sends only new files. Reading
a pickle runs code, and anyone with write access to a store could put one there: pickles are neither pushed nor pulled. Training
saves its portable checkpoints as safetensors (``training/portable_checkpoint.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.manifest import FileEntry, entries_of
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import snapshot_path
from alignment_core.artifacts.portable_paths import get_files
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import files_below, remove_tree
from alignment_core.errors import AlignmentError, Changed, Corrupt, NotFound, one_line
from alignment_core.files import link_or_copy

log = logging.getLogger(__name__)

_LOCK, _MARK = "lock", ".snapshot"
_LINKS = ".push"
"""Folder with hard links to the files of a push: the stage may delete its checkpoint, which stays readable here."""
_CHECKPOINT, _COMPLETE = "step-", "complete.json"
PLAIN = frozenset(
    {
        *(".json", ".jsonl", ".log", ".npy", ".npz", ".parquet", ".safetensors", ".txt", ".md", ""),
        *(".jinja", ".model", ".tiktoken"),  # of the tokenizer of the best model so far
    }
)
"""Suffixes of files that nothing unpickles."""
_Identity = tuple[int, int, int]
"""Inode, size and time of modification (ns) of a file."""
_POLL_SECONDS = 1.0
_THREADS = 8


class ProgressFiles(BaseModel):
    """The files of a progress folder at one moment."""

    model_config = ConfigDict(frozen=True)

    files: tuple[FileEntry, ...] = Field(description="the files; their bytes are blobs")


class StoredProgress:
    """The snapshot of one stage key. Only the process with the claim on the key uses it."""

    def __init__(self, store: Store, key: str) -> None:
        self.store = store
        self.key = key
        self.path = snapshot_path(key)
        self._entries: dict[tuple[str, _Identity], FileEntry] = {}
        self._pushed: Mapping[str, _Identity] = {}
        self._listed: set[FileEntry] = set()  # in the snapshot, while that has this version
        self._version = ""
        self._exists = False

    def pull(self, folder: Path) -> None:
        """Replace the content of ``folder`` by the snapshot, unless this machine pushed that snapshot itself."""
        stored = self.store.backend.stat(self.path)
        self._exists = stored is not None
        if stored is None or _read_mark(folder) == stored.version:
            return
        snapshot = _read(self.store, self.path)
        if snapshot is None:
            return
        files = tuple(entry for entry in snapshot.files if _is_plain(entry.path))
        if len(files) < len(snapshot.files):
            log.warning(
                "%s in %s lists files that may be pickles: the stage starts from the beginning",
                self.path,
                self.store.uri,
            )
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            intact = list(pool.map(self.store.blobs.is_intact, files))
        if not all(intact):
            log.warning(
                "%s in %s has lost %s: the stage goes on from what this machine has",
                self.path,
                self.store.uri,
                files[intact.index(False)].path,
            )
            return
        _empty(folder)
        try:
            get_files(self.store, folder, files, f"the progress of stage {self.key[:12]}")
        except (NotFound, Corrupt) as error:
            _empty(folder)
            log.warning("the stage starts from the beginning: %s", one_line(error))
            return
        self._listed = set(files)
        self._note(folder, stored)

    def push(self, folder: Path) -> bool:
        """Replace the snapshot by the content of ``folder``, to which files may be added at any time, and which may change once
        its files are linked; False if one changed before, and a retry is needed."""
        links = folder / _LINKS
        try:
            files = _consistent_files(folder)
            if not files or files == self._pushed:
                return True
            linked = _link(folder, files, links)
            if not files.items() <= _identities(settled(folder)).items():
                return False
            entries = self._entries_of(links, files)
            digests = {entry.sha256 for entry in entries}
            with self.store.leases.publication(digests, lasting=False):
                current = self.store.backend.stat(self.path)
                present = self._listed if current is not None and current.version == self._version else set()
                self.store.blobs.put_files([entry for entry in entries if entry not in present], links, linked)
                stored = self._write(ProgressFiles(files=entries))
        except (FileNotFoundError, NotFound, Changed):
            return False  # the stage deleted an old checkpoint meanwhile, or appended to a file
        finally:
            remove_tree(links)
        self._pushed = files
        self._listed = set(entries)
        if stored is not None:
            self._note(folder, stored)
        return True

    @contextmanager
    def mirrored(
        self, folder: Path, seconds: float, pushed: Callable[[float], None] = lambda _: None
    ) -> Iterator[None]:
        """Push each checkpoint of ``folder`` once it is complete, other files every ``seconds`` seconds, and the rest when the
        block ends with an error. Errors of the store are logged and do not end the block. ``pushed`` is called with the seconds
        that each push took."""
        stopping = threading.Event()
        arguments = (folder, seconds, stopping, pushed)
        remove_tree(folder / _LINKS)  # a process that was killed during a push left the space of a checkpoint taken
        thread = threading.Thread(target=self._follow, args=arguments, name="progress", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            stopping.set()
            thread.join()
            self._try(folder)
            raise
        finally:
            stopping.set()
            thread.join()

    def drop(self) -> None:
        """Delete the snapshot of a finished stage; its blobs are left to the collector."""
        if self._exists:
            self.store.backend.delete(self.path)

    def _follow(self, folder: Path, seconds: float, stopping: threading.Event, pushed: Callable[[float], None]) -> None:
        last, checkpoint = time.monotonic(), ""
        while not stopping.wait(min(_POLL_SECONDS, seconds)):
            newest = max((path.parent.name for path in folder.glob(f"{_CHECKPOINT}*/{_COMPLETE}")), default="")
            started = time.monotonic()
            if (newest != checkpoint or started - last > seconds) and self._try(folder):
                last, checkpoint = time.monotonic(), newest
                pushed(last - started)

    def _try(self, folder: Path) -> bool:
        try:
            return self.push(folder)
        except (AlignmentError, OSError) as error:
            log.warning("progress could not be put into the store: %s", error)
            return True  # try again after a while

    def _entries_of(self, links: Path, files: Mapping[str, _Identity]) -> tuple[FileEntry, ...]:
        """The entries of files; only new or changed ones are hashed."""
        hashed = {
            entry.path: entry for entry in entries_of(links, [path for path, _ in files.items() - self._entries.keys()])
        }
        self._entries = {file: self._entries.get(file) or hashed[file[0]] for file in files.items()}
        return tuple(self._entries[path, files[path]] for path in sorted(files))

    def _write(self, snapshot: ProgressFiles) -> Object | None:
        """Replace the snapshot unconditionally: this process holds the claim."""
        while True:
            stored = self.store.backend.stat(self.path)
            data = snapshot.model_dump_json().encode()
            if self.store.backend.put(self.path, data, replaces=stored.version if stored else None):
                self._exists = True
                return self.store.backend.stat(self.path)

    def _note(self, folder: Path, stored: Object) -> None:
        self._version = stored.version
        (folder / _MARK).write_text(stored.version)


def files_of(store: Store, path: str) -> tuple[FileEntry, ...]:
    """The files of the snapshot at ``path`` in a store; none if it cannot be read, since no stage can resume from it then."""
    snapshot = _read(store, path)
    return snapshot.files if snapshot else ()


def settled(folder: Path) -> dict[str, os.stat_result]:
    """The files of a progress folder that may be pushed: complete checkpoints without pickles, and finished files."""
    present = {
        path: stat for path, stat in files_below(folder).items() if path.partition("/")[0] not in (_LOCK, _MARK, _LINKS)
    }
    checkpoints = {path.partition("/")[0] for path in present if path.startswith(_CHECKPOINT) and "/" in path}
    complete = {checkpoint for checkpoint in checkpoints if f"{checkpoint}/{_COMPLETE}" in present}
    complete -= {path.partition("/")[0] for path in present if not _is_plain(path)}
    return {
        path: stat
        for path, stat in present.items()
        if _is_plain(path) and ((top := path.partition("/")[0]) in complete or top not in checkpoints)
    }


def _empty(folder: Path) -> None:
    with explained("read", folder):
        for path in folder.iterdir():
            if path.name != _LOCK:
                remove_tree(path)


def _consistent_files(folder: Path) -> dict[str, _Identity]:
    """The files of a progress folder that may be pushed. Checkpoints that complete while it is listed are left out: files that
    they refer to, such as images of episodes, may be missing in the list."""
    complete = {path.partition("/")[0] for path in settled(folder)}
    return {
        path: identity
        for path, identity in _identities(settled(folder)).items()
        if not path.startswith(_CHECKPOINT) or path.partition("/")[0] in complete
    }


def _identities(files: Mapping[str, os.stat_result]) -> dict[str, _Identity]:
    return {path: (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in files.items()}


def _link(folder: Path, paths: Iterable[str], links: Path) -> dict[str, os.stat_result]:
    """Link files of a folder into a new folder ``links``; their states there, by path."""
    remove_tree(links)
    for path in paths:
        (links / path).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(folder / path, links / path)
    return files_below(links)


def _is_plain(path: str) -> bool:
    """Whether the file is no pickle and has its final name."""
    return Path(path).suffix in PLAIN and ".partial/" not in path


def _read(store: Store, path: str) -> ProgressFiles | None:
    try:
        return ProgressFiles.model_validate_json(store.backend.read(path))
    except (NotFound, ValidationError) as error:
        log.warning(
            "%s in %s is not used, and the stage starts from the beginning: %s", path, store.uri, one_line(error)
        )
        return None


def _read_mark(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / _MARK).read_text()
    return ""
