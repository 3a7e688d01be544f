"""An index of a store on this machine: what small objects say, so that only new ones are read. The store stays the truth."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.index_file import Connection, connect, in_memory, make_way
from alignment_core.artifacts.manifest import Manifest, parse_manifest
from alignment_core.artifacts.paths import MANIFESTS, STAGES, TAGS, parse_tag_path
from alignment_core.artifacts.provenance import Provenance, parse_record
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.tag_history import TagMove, parse_move
from alignment_core.artifacts.workspace import local_name
from alignment_core.errors import Corrupt, NotFound
from alignment_core.home import align_home

log = logging.getLogger(__name__)

_THREADS = 16
_READ_AT_ONCE = 512  # objects; what is written at once, too
_SHOWN_AT_ONCE = 512
_MOST = (1 << 63) - 1  # that SQLite counts to; a manifest may say anything
_ATTEMPTS = 5  # to find the file as it was listed, while other processes write into it what they have listed


@dataclass(frozen=True)
class Summary:
    """An artifact in a list of all."""

    reference: Reference
    files: int
    size: int
    """Bytes of all files together."""
    made_by: tuple[str, ...]
    """Labels of the stages that made it, with the output's name where a stage made several."""
    made_at: str
    """End of the latest of them, ISO 8601 in UTC; empty for what was made outside."""
    pruned: bool
    """Whether its bytes were dropped on purpose."""

    @classmethod
    def of(cls, manifest: Manifest, records: Sequence[Provenance], pruned: bool) -> Summary:
        labels = tuple(label for record in records for label in record.labels_of(manifest.reference))
        made_at = max((record.finished_at for record in records), default="")
        return cls(manifest.reference, len(manifest.files), manifest.size, labels, made_at, pruned)


class Index:
    """What the records, manifests and tag moves of a store say, by the paths and versions that the back end lists.

    Each answer begins with a listing: what is not in that, or in another version, is no part of the answer. The file lies
    below ``ALIGN_HOME``; whatever becomes of it, answers are the same, and only take longer.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def path(self) -> Path:
        return align_home() / "indexes" / f"{local_name(self.backend.uri)}.sqlite"

    def view(self, *prefixes: str) -> View:
        """What the store holds below the prefixes now."""
        with ThreadPoolExecutor(max(1, len(prefixes))) as pool:
            listed = list(
                pool.map(lambda prefix: {one.path: one.version for one in self.backend.list(prefix)}, prefixes)
            )
        return self.view_of(dict(zip(prefixes, listed, strict=True)))

    def view_of(self, listed: dict[str, dict[str, str]]) -> View:
        """What the store holds according to listings: versions by path by prefix."""
        return View(self.backend, self.path, listed)


class View:
    """The store below some prefixes, as it was listed when the view was made, within a ``with``."""

    def __init__(self, backend: Backend, path: Path, listed: dict[str, dict[str, str]]) -> None:
        self._backend, self._path, self._listed = backend, path, listed
        self._db = self._settled()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def records(self, *stages: str) -> Iterator[Provenance]:
        """All stage records, or those of some stages, in order of the keys. Unreadable ones are logged and left out."""
        self._log_problems(STAGES)
        where = f"stage IN ({', '.join('?' * len(stages))})" if stages else "TRUE"
        for path, data in self._contents("records", where, *stages):
            yield parse_record(self._backend.uri, path, data)

    def recorded(self, keys: Collection[str]) -> list[Provenance]:
        """The records with these keys, as far as there are any."""
        return [
            parse_record(self._backend.uri, path, data)
            for key in keys
            for path, data in self._contents("records", "key = ?", key)
        ]

    def makers(self, reference: Reference) -> list[Provenance]:
        """The records that name an artifact among their outputs, in order of the keys."""
        return self._records_with("outputs", reference)

    def users(self, reference: Reference) -> list[Provenance]:
        """The records that name an artifact among their inputs, in order of the keys."""
        return self._records_with("inputs", reference)

    def manifests(self) -> Iterator[Manifest]:
        """Every manifest, in order of the digests. Corrupt ones are logged and left out."""
        self._log_problems(MANIFESTS)
        for path, data in self._contents("manifests", "TRUE"):
            yield parse_manifest(self._backend.uri, path, data)

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of every listed object."""
        for prefix in self._listed:
            yield from self._contents("objects", "path >= ? AND path < ?", *_between(prefix))

    def moves(self) -> Iterator[TagMove]:
        """Every listed move of a tag; per tag, oldest first. Raises Corrupt for one that cannot be read."""
        for prefix in self._listed:
            if prefix.startswith(TAGS):
                for (problem,) in self._rows(_PROBLEMS, *_between(prefix)):
                    raise Corrupt(problem)
                for path, data in self._contents("objects", "path >= ? AND path < ?", *_between(prefix)):
                    if parse_tag_path(path) is not None:
                        yield parse_move(self._backend.uri, path, data)

    def summaries(self, pruned: Collection[str]) -> list[Summary]:
        """Every artifact, in order of the digests; ``pruned`` are those of the artifacts whose bytes were dropped."""
        for prefix in (STAGES, MANIFESTS):
            self._log_problems(prefix)
        makers: dict[str, list[str]] = {}
        times: dict[str, str] = {}
        for reference, name, label, outputs, finished_at in self._rows(
            "SELECT reference, name, label, outputs, finished_at FROM outputs JOIN records USING (id)"
            " ORDER BY started_at, key, position"
        ):
            makers.setdefault(reference, []).append(f"{label} ({name})" if outputs > 1 else label)
            times[reference] = max(times.get(reference, ""), finished_at)
        found = self._rows("SELECT reference, files, bytes FROM manifests JOIN objects USING (id) ORDER BY path")
        return [
            Summary(one, files, size, tuple(makers.get(text, ())), times.get(text, ""), one.digest in pruned)
            for text, files, size in found
            for one in [Reference.parse(text)]
        ]

    # ---------------------------------------------------------------- inside

    def _records_with(self, edges: str, reference: Reference) -> list[Provenance]:
        where = f"id IN (SELECT id FROM {edges} WHERE reference = ?)"
        return [
            parse_record(self._backend.uri, path, data)
            for path, data in self._contents("records", where, str(reference))
        ]

    def _contents(self, table: str, where: str, *values: Any) -> Iterator[tuple[str, bytes]]:
        """Paths and bytes of objects, some at a time."""
        if table != "objects":
            table = f"{table} JOIN objects USING (id)"
        after = ""
        while True:
            rows = self._rows(
                f"SELECT path, data, sum FROM {table} JOIN contents USING (id) WHERE ({where}) AND path > ?"
                f" ORDER BY path LIMIT {_SHOWN_AT_ONCE}",
                *values,
                after,
                sound=lambda row: zlib.crc32(row[1]) == row[2],
            )
            for path, data, _ in rows:
                yield path, data
            if len(rows) < _SHOWN_AT_ONCE:
                return
            after = rows[-1][0]

    def _log_problems(self, prefix: str) -> None:
        for (problem,) in self._rows(_PROBLEMS, *_between(prefix)):
            log.warning("%s", problem)

    def _rows(self, query: str, *values: Any, sound: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """The answer to a query; the file is made anew where it turns out to be damaged."""
        try:
            rows = self._db.execute(query, values).fetchall()
            if all(map(sound, rows)):
                return rows
            raise sqlite3.DatabaseError("bytes in it have changed")
        except sqlite3.Error as error:
            self._db.close()
            self._db = self._settled() if make_way(self._path, error) else self._filled(in_memory())
            return self._db.execute(query, values).fetchall()

    def _settled(self) -> Connection:
        """A connection that sees all that was listed and nothing else, until it is closed."""
        for _ in range(2):
            try:
                return self._filled(connect(self._path))
            except (sqlite3.Error, OSError) as error:
                if not make_way(self._path, error):
                    break
        return self._filled(in_memory())

    def _filled(self, db: Connection) -> Connection:
        try:
            for _ in range(_ATTEMPTS):
                db.execute("BEGIN")
                if all(self._is_as_listed(db, prefix) for prefix in self._listed):
                    return db  # in this transaction, so that it stays so
                db.execute("ROLLBACK")
                for prefix, listed in self._listed.items():
                    self._fill(db, prefix, listed)
            raise TimeoutError("other processes write into it all the time")
        except BaseException:
            db.close()
            raise

    def _is_as_listed(self, db: Connection, prefix: str) -> bool:
        return dict(db.execute(_VERSIONS, _between(prefix))) == self._listed[prefix]

    def _fill(self, db: Connection, prefix: str, listed: dict[str, str]) -> None:
        """Read what is new, and forget what is gone. Nothing is locked while the store is read; whatever ends this process,
        the next one goes on from here."""
        known = dict(db.execute(_VERSIONS, _between(prefix)))
        with _changing(db):
            db.executemany("DELETE FROM objects WHERE path = ? AND version = ?", known.items() - listed.items())
        new = (path for path, version in listed.items() if known.get(path) != version)
        with ThreadPoolExecutor(_THREADS) as pool:
            while some := list(itertools.islice(new, _READ_AT_ONCE)):
                found = list(pool.map(self._read, some))
                with _changing(db):
                    for path, said in zip(some, found, strict=True):
                        if said is not None:
                            _insert(db, path, listed[path], said)
                for path, said in zip(some, found, strict=True):
                    if said is None:
                        del listed[path]

    def _read(self, path: str) -> _Said | None:
        """What an object says; None where it is gone since it was listed."""
        uri = self._backend.uri
        try:
            data = self._backend.read(path)
        except NotFound:
            return None
        try:
            if path.startswith(STAGES):
                return _Said(data, record=parse_record(uri, path, data))
            if path.startswith(MANIFESTS):
                return _Said(data, manifest=parse_manifest(uri, path, data))
            if parse_tag_path(path) is not None:
                parse_move(uri, path, data)
            return _Said(data)
        except Corrupt as error:
            return _Said(data, problem=str(error))


@dataclass(frozen=True)
class _Said:
    """The bytes of an object, and what they mean."""

    data: bytes
    record: Provenance | None = None
    manifest: Manifest | None = None
    problem: str | None = None


_VERSIONS = "SELECT path, version FROM objects WHERE path >= ? AND path < ?"
_PROBLEMS = "SELECT problem FROM objects WHERE path >= ? AND path < ? AND problem IS NOT NULL ORDER BY path"


def _between(prefix: str) -> tuple[str, str]:
    """What lies below a prefix that ends in '/' is at least the first and less than the second."""
    return prefix, prefix[:-1] + chr(ord("/") + 1)


@contextmanager
def _changing(db: Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has ended it already
            db.execute("ROLLBACK")
        raise


def _insert(db: Connection, path: str, version: str, said: _Said) -> None:
    db.execute("DELETE FROM objects WHERE path = ?", (path,))
    number = db.execute(
        "INSERT INTO objects (path, version, problem) VALUES (?, ?, ?)", (path, version, said.problem)
    ).lastrowid
    db.execute("INSERT INTO contents VALUES (?, ?, ?)", (number, said.data, zlib.crc32(said.data)))
    if (record := said.record) is not None:
        stage = record.key_parts.get("stage")
        known = stage if isinstance(stage, str) else None
        told = (record.key, known, record.label, record.started_at, record.finished_at, len(record.outputs))
        db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", (number, *told))
        outputs = enumerate(record.outputs.items())
        db.executemany(
            "INSERT INTO outputs VALUES (?, ?, ?, ?)",
            [(number, place, name, str(made)) for place, (name, made) in outputs],
        )
        inputs = [(number, role, str(used)) for role, used in record.inputs.items()]
        db.executemany("INSERT INTO inputs VALUES (?, ?, ?)", inputs)
    if (manifest := said.manifest) is not None:
        row = (number, str(manifest.reference), len(manifest.files), min(manifest.size, _MOST))
        db.execute("INSERT INTO manifests VALUES (?, ?, ?, ?)", row)
