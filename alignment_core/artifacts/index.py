"""An index of a store on this machine: copies of its small objects and one table of their facts. The store stays the truth."""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.index_file import Connection, connect, in_memory, remove_unusable, transaction
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
_READ_AT_ONCE = 512  # objects; so many are written in one transaction
_SHOWN_AT_ONCE = 512
_ATTEMPTS = 5  # other processes write what they have listed into the same file

Listing = dict[str, dict[str, str]]
"""Versions of objects by path, by prefix."""
Facts = list[tuple[str, str, str]]
"""What an object says, as the index can search it: kind of fact, value, and a note as JSON."""
T = TypeVar("T")


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
    """End of the latest of them, ISO 8601 in UTC; empty for an import."""
    pruned: bool
    """Whether its bytes were dropped on purpose."""

    @classmethod
    def of(cls, manifest: Manifest, records: Sequence[Provenance], pruned: bool) -> Summary:
        labels = tuple(label for record in records for label in record.labels_of(manifest.reference))
        made_at = max((record.finished_at for record in records), default="")
        return cls(manifest.reference, len(manifest.files), manifest.size, labels, made_at, pruned)


class Index:
    """The content of a store's records, manifests and tag moves, by the paths and versions that the back end lists.

    Each answer begins with a listing: objects that are not in it, or in another version, are no part of the answer. The file
    lies below ``ALIGN_HOME``; without it, or with a damaged one, answers are the same and only take longer.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def path(self) -> Path:
        return align_home() / "indexes" / f"{local_name(self.backend.uri)}.sqlite"

    def view(self, *prefixes: str) -> View:
        """The store below the prefixes as it is now."""
        with ThreadPoolExecutor(max(1, len(prefixes))) as pool:
            listings = pool.map(
                lambda prefix: {stored.path: stored.version for stored in self.backend.list(prefix)}, prefixes
            )
            return self.view_of(dict(zip(prefixes, listings, strict=True)))

    def view_of(self, listed: Listing) -> View:
        """The store as it was listed."""
        return View(self.backend, self.path, listed)


class View:
    """The store below some prefixes, as it was listed when the view was made, within a ``with``."""

    def __init__(self, backend: Backend, path: Path, listed: Listing) -> None:
        self._backend = backend
        self._path = path
        self._listed = listed
        self._db = self._open()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def records(self, *stages: str) -> Iterator[Provenance]:
        """All stage records, or those of some stages, in order of the keys. Unreadable ones are logged and left out."""
        self._log_problems(STAGES)
        yield from self._parsed(parse_record, STAGES, "stage" if stages else None, *stages)

    def by_key(self, keys: Collection[str]) -> dict[str, Provenance]:
        """The records that exist for these keys."""
        return {record.key: record for key in keys for record in self._parsed(parse_record, STAGES, "key", key)}

    def makers(self, reference: Reference) -> list[Provenance]:
        """The records that have an artifact among their outputs, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "output", str(reference)))

    def users(self, reference: Reference) -> list[Provenance]:
        """The records that have an artifact among their inputs, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "input", str(reference)))

    def manifests(self) -> Iterator[Manifest]:
        """Every manifest, in order of the digests. Corrupt ones are logged and left out."""
        self._log_problems(MANIFESTS)
        yield from self._parsed(parse_manifest, MANIFESTS)

    def moves(self) -> Iterator[TagMove]:
        """Every listed move of a tag; per tag, oldest first. Raises Corrupt for one that cannot be read."""
        for prefix in self._listed:
            if prefix.startswith(TAGS):
                for (problem,) in self._rows(_PROBLEMS, *_between(prefix)):
                    raise Corrupt(problem)
                yield from self._parsed(parse_move, prefix, "tag")

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of every listed object that can be read."""
        for prefix in self._listed:
            yield from self._parsed(lambda _, path, data: (path, data), prefix)

    def summaries(self, pruned: Collection[str]) -> list[Summary]:
        """Every artifact, in order of the digests; ``pruned`` are the digests of those whose bytes were dropped."""
        for prefix in (STAGES, MANIFESTS):
            self._log_problems(prefix)
        makers = defaultdict(list)
        for reference, note in self._rows(_FACTS, "output"):
            makers[reference].append(json.loads(note))
        summaries = []
        for text, note in self._rows(_FACTS, "artifact"):
            reference, (files, size) = Reference.parse(text), json.loads(note)
            runs = sorted(makers[text], key=lambda run: run[0])
            labels = tuple(label for _, _, label in runs)
            made_at = max((finished_at for _, finished_at, _ in runs), default="")
            summaries.append(Summary(reference, files, size, labels, made_at, reference.digest in pruned))
        return summaries

    def _parsed(
        self, parse: Callable[[str, str, bytes], T], prefix: str, fact: str | None = None, *values: str
    ) -> Iterator[T]:
        """The readable objects below a prefix, or those with a fact (with one of these values), in order of their paths."""
        after, end = _between(prefix)
        wanted = f" AND value IN ({', '.join('?' * len(values))})" if values else ""
        where = f" AND id IN (SELECT id FROM facts WHERE fact = ?{wanted})" if fact else ""
        while True:
            rows = self._rows(
                f"SELECT path, data, sum FROM objects WHERE path > ? AND path < ? AND problem IS NULL{where}"
                f" ORDER BY path LIMIT {_SHOWN_AT_ONCE}",
                *(after, end, *([fact] if fact else []), *values),
                intact=lambda row: zlib.crc32(row[1]) == row[2],
            )
            for path, data, _ in rows:
                yield parse(self._backend.uri, path, data)
            if len(rows) < _SHOWN_AT_ONCE:
                return
            after = rows[-1][0]

    def _log_problems(self, prefix: str) -> None:
        for (problem,) in self._rows(_PROBLEMS, *_between(prefix)):
            log.warning("%s", problem)

    def _rows(self, query: str, *values: Any, intact: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """The answer to a query; the file is made anew where it turns out to be damaged."""
        try:
            rows = self._db.execute(query, values).fetchall()
            if all(map(intact, rows)):
                return rows
            raise sqlite3.DatabaseError("bytes in it have changed")
        except sqlite3.Error as error:
            self._db.close()
            self._db = self._open() if remove_unusable(self._path, error) else self._filled(in_memory())
            return self._db.execute(query, values).fetchall()

    def _open(self) -> Connection:
        """A connection that sees the listed objects and nothing else, until it is closed."""
        for _ in range(2):
            try:
                return self._filled(connect(self._path))
            except (sqlite3.Error, OSError) as error:
                if not remove_unusable(self._path, error):
                    break
        return self._filled(in_memory())

    def _filled(self, db: Connection) -> Connection:
        try:
            for _ in range(_ATTEMPTS):
                db.execute("BEGIN")  # stays open, so that later writes of other processes are not seen
                if all(_versions(db, prefix) == versions for prefix, versions in self._listed.items()):
                    return db
                db.execute("ROLLBACK")
                for prefix, versions in self._listed.items():
                    self._fill(db, prefix, versions)
            raise TimeoutError("other processes write into it all the time")
        except BaseException:
            db.close()
            raise

    def _fill(self, db: Connection, prefix: str, versions: dict[str, str]) -> None:
        """Read new objects and drop deleted ones. The store is read outside of transactions, so that a slow or killed process
        blocks no other; the next one continues from here."""
        known = _versions(db, prefix)
        with transaction(db):
            db.executemany("DELETE FROM objects WHERE path = ? AND version = ?", known.items() - versions.items())
        new = [path for path, version in versions.items() if known.get(path) != version]
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(new), _READ_AT_ONCE):
                paths = new[start : start + _READ_AT_ONCE]
                contents = list(pool.map(self._read, paths))
                with transaction(db):
                    for path, content in zip(paths, contents, strict=True):
                        if content is None:
                            del versions[path]
                        else:
                            _insert(db, path, versions[path], *content)

    def _read(self, path: str) -> tuple[bytes, str | None, Facts] | None:
        """Bytes of an object, why it cannot be read, and its facts; None where it is gone since it was listed."""
        try:
            data = self._backend.read(path)
        except NotFound:
            return None
        try:
            return data, None, _facts(self._backend.uri, path, data)
        except Corrupt as error:
            return data, str(error), []


def _facts(uri: str, path: str, data: bytes) -> Facts:
    """Raises Corrupt."""
    if path.startswith(STAGES):
        record = parse_record(uri, path, data)
        ends = record.started_at, record.finished_at
        shown = [(reference, record.labels_of(reference)) for reference in dict.fromkeys(record.outputs.values())]
        return [
            ("key", record.key, ""),
            ("stage", str(record.key_parts.get("stage")), ""),
            *(("input", str(reference), role) for role, reference in record.inputs.items()),
            *(("output", str(one), json.dumps([*ends, label])) for one, labels in shown for label in labels),
        ]
    if path.startswith(MANIFESTS):
        manifest = parse_manifest(uri, path, data)
        return [("artifact", str(manifest.reference), json.dumps([len(manifest.files), manifest.size]))]
    if parse_tag_path(path) is not None:
        return [("tag", parse_move(uri, path, data).name, "")]
    return []


_FACTS = "SELECT value, note FROM facts JOIN objects USING (id) WHERE fact = ? ORDER BY path, position"
_PROBLEMS = "SELECT problem FROM objects WHERE path > ? AND path < ? AND problem IS NOT NULL ORDER BY path"


def _versions(db: Connection, prefix: str) -> dict[str, str]:
    return dict(db.execute("SELECT path, version FROM objects WHERE path > ? AND path < ?", _between(prefix)))


def _between(prefix: str) -> tuple[str, str]:
    """Bounds of the paths below a prefix that ends in '/'."""
    return prefix, prefix[:-1] + chr(ord("/") + 1)


def _insert(db: Connection, path: str, version: str, data: bytes, problem: str | None, facts: Facts) -> None:
    db.execute("DELETE FROM objects WHERE path = ?", (path,))
    number = db.execute(
        "INSERT INTO objects (path, version, problem, data, sum) VALUES (?, ?, ?, ?, ?)",
        (path, version, problem, data, zlib.crc32(data)),
    ).lastrowid
    rows = [(number, position, *fact) for position, fact in enumerate(facts)]
    db.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?)", rows)
