"""The SQLite file of an index: rebuilt if it is unusable, and replaced by a database in memory if no file can be written."""

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

VERSION = 4
"""Version of the tables; a file with another one is rebuilt."""
_BUSY_SECONDS = 10.0
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, version TEXT NOT NULL,
    data BLOB NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (fact TEXT NOT NULL, value TEXT NOT NULL, id INTEGER NOT NULL REFERENCES objects
    ON DELETE CASCADE, note TEXT NOT NULL, PRIMARY KEY (fact, value, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS listings ON objects (path, version);
CREATE INDEX IF NOT EXISTS objects_of_facts ON facts (id);
PRAGMA user_version = {VERSION};
COMMIT;
"""
_NOT_DAMAGE = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR),
}
_warned: set[Path] = set()


class Connection(sqlite3.Connection):
    """A connection that keeps other processes from removing its file as long as it is open."""

    lock = contextlib.ExitStack()

    def close(self) -> None:
        super().close()
        self.lock.close()


def connect(path: Path) -> Connection:
    """Open an index, and create it if there is none. Raises sqlite3.Error or OSError if it cannot be used."""
    make_like_parent(path.parent)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open_lock(path.with_suffix(".lock")))
        fcntl.flock(lock, fcntl.LOCK_SH)
        _create_file(path)
        if os.geteuid() not in (path.stat().st_uid, 0):
            raise PermissionError(f"it belongs to user {path.stat().st_uid}")
        connection = _opened(str(path))
        connection.lock = stack.pop_all()
        return connection


def in_memory() -> Connection:
    """An index in memory, which ends with its connection."""
    return _opened(":memory:")


def remove_unusable(path: Path, error: Exception) -> bool:
    """Remove an index that is damaged or has other tables. False if that would not help, or other processes have it open."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the upper bits are detail
    if not isinstance(error, sqlite3.Error) or code in _NOT_DAMAGE:
        _warn(path, str(error))
        return False
    try:
        with open_lock(path.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # SQLite damages a file whose companions are replaced
            for companion in ("", "-wal", "-shm", "-journal"):
                Path(f"{path}{companion}").unlink(missing_ok=True)
    except OSError as problem:
        _warn(path, str(problem))
        return False
    log.info("the index %s is rebuilt: %s", path, error)
    return True


def _warn(path: Path, reason: str) -> None:
    if path not in _warned:  # once in a process
        _warned.add(path)
        log.warning("the store is read without an index, which takes longer: %s: %s", path, reason)


def _create_file(path: Path) -> None:
    """Create the file for the owner of its folder, also when root is the first to use it."""
    owner = path.parent.stat()
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # network file systems may map root to nobody
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.close(descriptor)


def _opened(path: str) -> Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level="IMMEDIATE", check_same_thread=False, factory=Connection
    )
    try:
        with contextlib.suppress(sqlite3.OperationalError):  # another process sets it at this moment
            connection.execute("PRAGMA journal_mode = WAL")  # so that views stay open while other processes write
        connection.execute("PRAGMA synchronous = NORMAL")  # a power cut costs new rows at most, which are read again
        connection.execute("PRAGMA foreign_keys = ON")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"it has version {version} instead of {VERSION}")
        if version == 0:
            connection.executescript(_TABLES)
    except BaseException:
        connection.close()
        raise
    return connection
