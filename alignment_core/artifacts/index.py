"""An index of a store on this machine: copies of its small objects and a table of facts. The store itself is authoritative."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.index_facts import Brief, Facts, facts_of
from alignment_core.artifacts.index_file import Connection, connect, in_memory, remove_unusable
from alignment_core.artifacts.manifest import Manifest, parse_manifest
from alignment_core.artifacts.paths import MANIFESTS, STAGES
from alignment_core.artifacts.provenance import Provenance, parse_record
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.tag_history import TagMove, parse_move
from alignment_core.artifacts.workspace import local_name
from alignment_core.errors import Corrupt, NotFound, UserError
from alignment_core.home import align_home

log = logging.getLogger(__name__)

_THREADS = 16
_READ_AT_ONCE = 512  # objects; so many are written in one transaction
_ROWS_AT_ONCE = 512
LONGEST_PATTERN = 500
COMPARISONS = ("<", "<=", "=", ">=", ">")
_ATTEMPTS = 5  # other processes fill the same file from their own listings

Listing = dict[str, dict[str, str]]
"""Versions of objects by path, by prefix."""
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """An artifact in a list of all."""

    reference: Reference
    files: int
    size: int
    """Bytes of all files together."""
    made_by: tuple[str, ...]
    """Labels of the stages that made it, with the output's name if a stage has several."""
    made_at: str
    """End of the latest of them, ISO 8601 in UTC; empty for an import."""
    pruned: bool
    """Whether retention deleted its bytes."""

    @classmethod
    def of(cls, manifest: Manifest, records: Sequence[Provenance], pruned: bool) -> Summary:
        labels = tuple(label for record in records for label in record.labels_of(manifest.reference))
        made_at = max((record.finished_at for record in records), default="")
        return cls(manifest.reference, len(manifest.files), manifest.size, labels, made_at, pruned)


@dataclass(frozen=True)
class RunCost:
    """What a run made: the number of its stages, and their seconds."""

    stages: int
    seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Found:
    """An artifact of a search, with its latest record in short; none for an import."""

    reference: Reference
    files: int
    size: int
    """Bytes of all files together."""
    brief: Brief | None


class Index:
    """The content of a store's records, manifests and tag moves, by the paths and versions that the back end lists.

    Each answer begins with a listing: objects that are not in it, or in another version, are no part of the answer. The file
    lies below ``ALIGN_HOME``; without it, or with a damaged one, answers are the same and only take longer.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @cached_property
    def path(self) -> Path:
        """The file, which stays that of the home at its first use: a rebuild changes the home of its process."""
        return align_home() / "indexes" / f"{local_name(self.backend.uri)}.sqlite"

    def view(self, *prefixes: str) -> View:
        """The store below the prefixes as it is now."""
        with ThreadPoolExecutor(len(prefixes)) as pool:
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
        yield from self._parsed(parse_record, STAGES, "stage", *stages)

    def by_key(self, keys: Collection[str]) -> dict[str, Provenance]:
        """The records that exist for these keys."""
        return {record.key: record for key in keys for record in self._parsed(parse_record, STAGES, "key", key)}

    def makers(self, reference: Reference) -> list[Provenance]:
        """The records that have an artifact among their outputs, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "output", str(reference)))

    def users(self, reference: Reference) -> list[Provenance]:
        """The records that have an artifact among their inputs, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "input", str(reference)))

    def of_run(self, run_id: str) -> list[Provenance]:
        """The records that a run made, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "run", run_id))

    def history(self, reference: Reference) -> list[Brief]:
        """The records behind an artifact, in short, the oldest first."""
        rows = self._rows(
            "WITH RECURSIVE behind(id) AS (SELECT id FROM facts WHERE fact = 'output' AND value = ? UNION"
            " SELECT made.id FROM behind JOIN facts AS used ON used.id = behind.id AND +used.fact = 'input'"
            " JOIN facts AS made ON made.fact = 'output' AND made.value = used.value)"
            " SELECT value, note FROM behind JOIN facts USING (id) WHERE +fact = 'key'",
            str(reference),
        )
        return sorted((Brief.of(*row) for row in rows), key=lambda brief: (brief.started_at, brief.key))

    def using(self, reference: Reference) -> list[Brief]:
        """The records that have an artifact among their inputs, in short, the oldest first."""
        rows = self._rows(
            "SELECT known.value, known.note FROM facts AS used JOIN facts AS known ON known.id = used.id"
            " AND +known.fact = 'key' WHERE used.fact = 'input' AND used.value = ?",
            str(reference),
        )
        return sorted((Brief.of(*row) for row in rows), key=lambda brief: (brief.started_at, brief.key))

    def outputs(self, references: Collection[Reference]) -> dict[Reference, Brief]:
        """The latest record, in short, of each of these artifacts that a stage made."""
        rows = self._rows(
            "SELECT made.value, known.value, known.note FROM json_each(?) AS wanted"
            " CROSS JOIN facts AS made ON made.fact = 'output' AND made.value = wanted.value"
            " JOIN facts AS known ON known.id = made.id AND +known.fact = 'key'",
            json.dumps([str(reference) for reference in references]),
        )
        briefs = sorted(
            ((Reference.parse(made), Brief.of(*row)) for made, *row in rows), key=lambda pair: pair[1].finished_at
        )
        return dict(briefs)

    def kinds(self) -> dict[str, int]:
        """The number of artifacts of each kind, the most frequent one first."""
        return dict(
            self._rows(
                "SELECT value, count(*) FROM facts WHERE fact = 'kind' GROUP BY value ORDER BY count(*) DESC, value"
            )
        )

    def search(
        self,
        text: str,
        kind: str,
        among: Collection[Reference],
        start: int,
        count: int,
        only: Collection[Reference] | None = None,
    ) -> list[Found]:
        """Artifacts, the latest first and imports last: those of a ``kind``, if it is not empty, that match a text, if it is
        not empty, by what :meth:`_matching` looks at, or are ``among`` others that fit. With ``only``, no other."""
        known = None if only is None else {str(reference) for reference in only}
        if text:
            matching = {*self._matching(text), *map(str, among)}
            known = matching if known is None else matching & known
        begin = f"{kind}@" if kind else ""
        values = [value for value in self.latest if value.startswith(begin) and (known is None or value in known)]
        page = [Reference.parse(value) for value in values[start : start + count]]
        briefs = self.outputs(page)
        sizes = self._rows(
            "SELECT artifact.value, artifact.note FROM json_each(?) AS wanted"
            " CROSS JOIN facts AS artifact ON artifact.fact = 'artifact' AND artifact.value = wanted.value",
            json.dumps([str(reference) for reference in page]),
        )
        by_reference = {Reference.parse(value): json.loads(note) for value, note in sizes}
        entries = []
        for reference in page:
            files, size = by_reference[reference]
            entries.append(Found(reference, files, size, briefs.get(reference)))
        return entries

    @cached_property
    def latest(self) -> list[str]:
        """All artifacts, by the end of their latest stage, the latest first and imports last."""
        made = self._rows(
            "SELECT made.value FROM facts AS finished CROSS JOIN facts AS made"
            " ON made.id = finished.id AND +made.fact = 'output' WHERE finished.fact = 'finished'"
            " ORDER BY finished.value DESC, made.value"
        )
        artifacts = [value for (value,) in self._rows("SELECT value FROM facts WHERE fact = 'artifact' ORDER BY value")]
        there = set(artifacts)
        return list(dict.fromkeys([*(value for (value,) in made if value in there), *artifacts]))

    def _matching(self, text: str) -> list[str]:
        """Artifacts whose reference contains a text, or one of whose records has it in its label, stage or run, or in the path,
        digest or version of a source."""
        pattern = _containing(text)
        rows = self._rows(
            "SELECT value FROM facts WHERE fact = 'artifact' AND value LIKE ? ESCAPE '^' UNION"
            " SELECT made.value FROM facts AS named JOIN facts AS made ON made.id = named.id AND +made.fact = 'output'"
            " WHERE (named.fact IN ('label', 'stage', 'run') AND named.value LIKE ? ESCAPE '^')"
            " OR (named.fact = 'source' AND (named.value LIKE ? ESCAPE '^' OR named.note LIKE ? ESCAPE '^'))",
            *(pattern, pattern, pattern, pattern),
        )
        return [value for (value,) in rows]

    def measured(self, metric: str, comparison: str, value: float) -> list[Reference]:
        """The outputs of the records whose metric compares so with a value; one of :data:`COMPARISONS`."""
        if comparison not in COMPARISONS:
            raise ValueError(f"{comparison} is none of {', '.join(COMPARISONS)}")
        rows = self._rows(
            "SELECT DISTINCT made.value FROM facts AS metric"
            " JOIN facts AS made ON made.id = metric.id AND +made.fact = 'output'"
            f" WHERE metric.fact = 'metric' AND metric.value = ? AND CAST(metric.note AS REAL) {comparison} ?",
            metric,
            value,
        )
        return [Reference.parse(output) for (output,) in rows]

    def runs(self) -> dict[str, RunCost]:
        """What each run made, by id; records of no run are under an empty one."""
        costs: dict[str, RunCost] = defaultdict(lambda: RunCost(0, 0.0, 0.0))
        for run_id, note in self._rows("SELECT value, note FROM facts WHERE fact = 'run'"):
            seconds, device_seconds = json.loads(note)
            sums = costs[run_id]
            costs[run_id] = RunCost(sums.stages + 1, sums.seconds + seconds, sums.device_seconds + device_seconds)
        return dict(costs)

    def described(self, reference: Reference) -> list[Provenance]:
        """The records that an artifact describes: all that a recipe, an environment or the user's code made."""
        return list(self._parsed(parse_record, STAGES, "description", str(reference)))

    def sources(self, text: str = "") -> dict[str, list[tuple[str, str]]]:
        """Digests and versions of the sources outside the store that stages read, by path; those whose paths contain a text, or
        whose digest or version begins with it."""
        pins: dict[str, list[tuple[str, str]]] = defaultdict(list)
        rows = self._rows(
            "SELECT DISTINCT value, note FROM facts WHERE fact = 'source'"
            " AND (value LIKE ? ESCAPE '^' OR note LIKE ? ESCAPE '^') ORDER BY value, note",
            *(_containing(text), f'%"{_escaped(text)}%'),
        )
        for path, note in rows:
            digest, version = json.loads(note)
            pins[path].append((digest, version))
        return dict(pins)

    def readers(self, *paths: str) -> list[Provenance]:
        """The records of stages that read one of these sources, in order of the keys."""
        return list(self._parsed(parse_record, STAGES, "source", *paths)) if paths else []

    def ancestors(self, reference: Reference) -> frozenset[Reference]:
        """Everything that an artifact was made from, directly or not."""
        return self._reached(reference, "output", "input")

    def descendants(self, reference: Reference) -> frozenset[Reference]:
        """Everything that was made from an artifact, directly or not."""
        return self._reached(reference, "input", "output")

    def _reached(self, reference: Reference, entry: str, exit: str) -> frozenset[Reference]:
        """The artifacts that records lead to, from one with the fact ``entry`` to those with the fact ``exit``."""
        # The plus keeps SQLite from looking up all facts of that name: the index of records is the one to use.
        rows = self._rows(
            "WITH RECURSIVE reached(value) AS (SELECT ? UNION SELECT next.value FROM reached"
            " JOIN facts AS record ON record.fact = ? AND record.value = reached.value"
            " JOIN facts AS next ON next.id = record.id AND +next.fact = ?) SELECT value FROM reached",
            *(str(reference), entry, exit),
        )
        return frozenset(Reference.parse(value) for (value,) in rows) - {reference}

    def manifests(self) -> Iterator[Manifest]:
        """Every manifest, in order of the digests. Corrupt ones are logged and left out."""
        self._log_problems(MANIFESTS)
        yield from self._parsed(parse_manifest, MANIFESTS)

    def moves(self) -> Iterator[TagMove]:
        """Every listed move of a tag; per tag, oldest first. Raises Corrupt for one that cannot be read."""
        for prefix in self._listed:
            for problem in self._problems(prefix):
                raise Corrupt(problem)
            yield from self._parsed(parse_move, prefix, "tag")

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Path and bytes of every listed object that can be read."""
        for prefix in self._listed:
            yield from self._parsed(lambda _, path, data: (path, data), prefix)

    def manifest(self, reference: Reference) -> Manifest | None:
        """The manifest of an artifact; None if there is none in the listing."""
        return next(self._parsed(parse_manifest, MANIFESTS, "artifact", str(reference)), None)

    def summaries(self, pruned: Collection[str]) -> list[Summary]:
        """Every artifact, in order of the digests; ``pruned`` are the digests of those whose bytes were deleted."""
        for prefix in (STAGES, MANIFESTS):
            self._log_problems(prefix)
        notes = "SELECT value, note FROM facts WHERE fact = ?"
        runs = defaultdict(list)
        for output, note in self._rows(notes, "output"):
            runs[output].append(json.loads(note))
        summaries = []
        for artifact, note in self._rows(notes, "artifact"):
            reference = Reference.parse(artifact)
            files, size = json.loads(note)
            makers = sorted(runs[artifact])
            labels = tuple(label for *_, labels in makers for label in labels)
            made_at = max((finished_at for _, _, finished_at, _ in makers), default="")
            summaries.append(Summary(reference, files, size, labels, made_at, reference.digest in pruned))
        return sorted(summaries, key=lambda summary: summary.reference.digest)

    def _parsed(self, parse: Callable[[str, str, bytes], T], prefix: str, fact: str = "", *values: str) -> Iterator[T]:
        """The readable objects below a prefix, or those with a fact (with one of these values), in order of their paths."""
        after, end = _between(prefix)
        among = f" AND value IN ({', '.join('?' * len(values))})" if values else ""
        having = f"IN (SELECT id FROM facts WHERE fact = '{fact}'{among})"
        readable = having if fact else "NOT IN (SELECT id FROM facts WHERE fact = 'problem')"
        while True:
            rows = self._rows(
                f"SELECT path, data, sum FROM objects WHERE id {readable} AND path > ? AND path < ?"
                f" ORDER BY path LIMIT {_ROWS_AT_ONCE}",
                *(*values, after, end),
                intact=lambda row: zlib.crc32(row[1]) == row[2],
            )
            for after, data, _ in rows:
                yield parse(self._backend.uri, after, data)
            if len(rows) < _ROWS_AT_ONCE:
                return

    def _problems(self, prefix: str) -> list[str]:
        """Why objects below a prefix cannot be read, in order of their paths."""
        problems = "SELECT value FROM facts JOIN objects USING (id) WHERE fact = 'problem' AND path > ? AND path < ?"
        return [problem for (problem,) in self._rows(f"{problems} ORDER BY path", *_between(prefix))]

    def _log_problems(self, prefix: str) -> None:
        for problem in self._problems(prefix):
            log.warning("%s", problem)

    def _rows(self, query: str, *values: Any, intact: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """The rows of a query; a file that turns out to be damaged is rebuilt."""
        try:
            rows = self._db.execute(query, values).fetchall()
            if all(map(intact, rows)):
                return rows
            raise sqlite3.DatabaseError("bytes in it have changed")
        except sqlite3.Error as error:
            self._db.close()
            self._db = self._open(error)
            return self._db.execute(query, values).fetchall()

    def _open(self, error: Exception | None = None) -> Connection:
        """A connection that sees the listed objects and nothing else, until it is closed. ``error``: why the file is opened
        again."""
        for _ in range(_ATTEMPTS):
            if error is not None and not remove_unusable(self._path, error):
                break
            try:
                return self._filled(connect(self._path))
            except (sqlite3.Error, OSError) as problem:
                error = problem
        return self._filled(in_memory())

    def _filled(self, db: Connection) -> Connection:
        try:
            for _ in range(_ATTEMPTS):
                # The transaction stays open as long as the view: it hides what other processes write into the file meanwhile.
                db.execute("BEGIN")
                if all(_versions(db, prefix) == versions for prefix, versions in self._listed.items()):
                    return db
                db.rollback()
                for prefix, versions in self._listed.items():
                    self._fill(db, prefix, versions)
            raise TimeoutError("other processes keep changing it")
        except BaseException:
            db.close()
            raise

    def _fill(self, db: Connection, prefix: str, versions: dict[str, str]) -> None:
        """Read new objects and drop deleted ones. The store is read outside of transactions, so that a slow or killed process
        blocks no other; the next one continues from here."""
        known = _versions(db, prefix)
        with db:
            db.executemany("DELETE FROM objects WHERE path = ? AND version = ?", known.items() - versions.items())
        new = [path for path, version in versions.items() if known.get(path) != version]
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(new), _READ_AT_ONCE):
                paths = new[start : start + _READ_AT_ONCE]
                contents = list(pool.map(self._read, paths))
                with db:
                    for path, data in zip(paths, contents, strict=True):
                        if data is None:
                            del versions[path]
                        else:
                            _insert(db, path, versions[path], data, facts_of(self._backend.uri, path, data))

    def _read(self, path: str) -> bytes | None:
        """Bytes of an object; None if it was deleted since the listing."""
        with suppress(NotFound):
            return self._backend.read(path)
        return None


def _escaped(text: str) -> str:
    """A text of a LIKE pattern with the escape character ^. Raises UserError for one that SQLite refuses as a pattern."""
    if len(text) > LONGEST_PATTERN:
        raise UserError(f"a search has {len(text)} characters: give at most {LONGEST_PATTERN}")
    return re.sub(r"([%_^])", r"^\1", text)


def _containing(text: str) -> str:
    return f"%{_escaped(text)}%"


def _versions(db: Connection, prefix: str) -> dict[str, str]:
    return dict(db.execute("SELECT path, version FROM objects WHERE path > ? AND path < ?", _between(prefix)))


def _between(prefix: str) -> tuple[str, str]:
    """Bounds of the paths below a prefix that ends in '/'."""
    return prefix, prefix[:-1] + chr(ord("/") + 1)


def _insert(db: Connection, path: str, version: str, data: bytes, facts: Facts) -> None:
    db.execute("DELETE FROM objects WHERE path = ?", (path,))
    number = db.execute(
        "INSERT INTO objects (path, version, data, sum) VALUES (?, ?, ?, ?)",
        (path, version, data, zlib.crc32(data)),
    ).lastrowid
    db.executemany("INSERT INTO facts VALUES (?, ?, ?, ?)", [(*fact, number, note) for fact, note in facts.items()])
