"""The SQLite file of an index: opened, made anew where it cannot be used, and replaced by memory where there can be none."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from pathlib import Path

from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.workspace import open_lock

log = logging.getLogger(__name__)

VERSION = 1
"""Of the tables; a file with others is made anew."""
_BUSY_SECONDS = 10.0
_TABLES = """
CREATE TABLE objects (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, version TEXT NOT NULL, problem TEXT);
CREATE TABLE contents (id INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, data BLOB NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE records (id INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, key TEXT NOT NULL, stage TEXT,
    label TEXT NOT NULL, started_at TEXT NOT NULL, finished_at TEXT NOT NULL, outputs INTEGER NOT NULL);
CREATE TABLE outputs (id INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE, position INTEGER NOT NULL,
    name TEXT NOT NULL, reference TEXT NOT NULL, PRIMARY KEY (id, position)) WITHOUT ROWID;
CREATE TABLE inputs (id INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE, role TEXT NOT NULL, reference TEXT NOT NULL,
    PRIMARY KEY (id, role)) WITHOUT ROWID;
CREATE TABLE manifests (id INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, reference TEXT NOT NULL,
    files INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE INDEX versions ON objects (path, version);
CREATE INDEX keys ON records (key);
CREATE INDEX stages ON records (stage);
CREATE INDEX makers ON outputs (reference);
CREATE INDEX users ON inputs (reference);
"""
_NOT_ITS_FAULT = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR),
}
_told: set[str] = set()


class Connection(sqlite3.Connection):
    """A connection that keeps others from removing its file as long as it is open."""

    lock: contextlib.ExitStack | None = None

    def close(self) -> None:
        super().close()
        if self.lock is not None:
            self.lock.close()


def connect(path: Path) -> Connection:
    """Open an index, made if there is none. Raises sqlite3.Error or OSError where it cannot be used."""
    make_like_parent(path.parent)
    with contextlib.ExitStack() as held:
        lock = held.enter_context(open_lock(path.with_suffix(".lock")))
        fcntl.flock(lock, fcntl.LOCK_SH)
        _make_empty(path)
        if os.geteuid() not in (path.stat().st_uid, 0):
            raise PermissionError(f"it belongs to user {path.stat().st_uid}")
        opened = _opened(str(path))
        try:
            with contextlib.suppress(sqlite3.OperationalError):  # another process does it just now
                opened.execute("PRAGMA journal_mode = WAL")
            opened.execute("PRAGMA synchronous = NORMAL")
            _make_tables(opened)
        except BaseException:
            opened.close()
            raise
        opened.lock = held.pop_all()
        return opened


def in_memory() -> Connection:
    """An index that goes with the connection."""
    opened = _opened(":memory:")
    _make_tables(opened)
    return opened


def make_way(path: Path, error: Exception) -> bool:
    """Remove an index that is damaged, or of another version. False where that would not help, or others have it open."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the rest of it is detail
    if not isinstance(error, sqlite3.Error) or code in _NOT_ITS_FAULT:
        tell(path, error)
        return False
    try:
        with open_lock(path.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # SQLite damages a file whose companions others replace
            for companion in ("", "-wal", "-shm", "-journal"):
                Path(f"{path}{companion}").unlink(missing_ok=True)
    except OSError as hindered:
        tell(path, hindered)
        return False
    log.info("the index %s is made anew: %s", path, error)
    return True


def tell(path: Path, why: Exception) -> None:
    """Say once in a process why there is no index."""
    if str(path) not in _told:
        _told.add(str(path))
        log.warning("the store is read without an index, which takes longer: %s: %s", path, why)


def _opened(path: str) -> Connection:
    opened = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, factory=Connection
    )
    opened.execute("PRAGMA foreign_keys = ON")
    return opened


def _make_empty(path: Path) -> None:
    """Create the file for the owner of its folder, also where root does it first."""
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if os.geteuid() == 0:
                owner = path.parent.stat()
                with contextlib.suppress(OSError):  # such as on a network file system, where root is nobody
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
        finally:
            os.close(descriptor)


def _make_tables(opened: Connection) -> None:
    if _version(opened) == VERSION:
        return
    opened.execute("BEGIN IMMEDIATE")
    try:
        found = _version(opened)
        if found not in (0, VERSION):
            raise sqlite3.DatabaseError(f"it has version {found} instead of {VERSION}")
        if found == 0:
            for statement in filter(str.strip, _TABLES.split(";")):
                opened.execute(statement)
            opened.execute(f"PRAGMA user_version = {VERSION}")
        opened.execute("COMMIT")
    except BaseException:
        opened.execute("ROLLBACK")
        raise


def _version(opened: Connection) -> int:
    return int(opened.execute("PRAGMA user_version").fetchone()[0])
