"""Answers of people about the pairs of one round: two files in a folder of the home, of which the second one only grows."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.canonical import derive_seed
from alignment_core.errors import AlignmentError, UserError
from alignment_core.files import write_whole
from alignment_core.home import align_home
from alignment_core.nights.labels import ANSWERS, QUESTION, agreement_of, exported, pairs_of, scored_of
from alignment_core.printable import printable

PAIRS, GIVEN = "pairs.jsonl", "answers.jsonl"
LONGEST_NAME = 64

Row = dict[str, Any]


def folder_of(reference: Reference) -> Path:
    """The folder for the pairs of a round's scores or rollouts."""
    return align_home() / "labels" / f"{reference.kind}-{reference.digest}"


def make_pairs(store: Store, reference: Reference, most: int | None = None) -> None:
    """Write the pairs of a round's scores or rollouts, unless they are there: ``most`` of them, or all. Raises AlignmentError
    and OSError."""
    folder = folder_of(reference)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one makes them, which takes seconds
        path = folder / PAIRS
        if not path.exists():
            chosen, _ = pairs_of(store, *scored_of(store, reference), most=most)
            write_whole(path, lambda file: file.write(exported(chosen, "jsonl").encode()))


def begun() -> list[Reference]:
    """The rounds whose pairs are labelled on this machine, the latest first."""
    folders = [path.parent for path in (align_home() / "labels").glob(f"*/{PAIRS}")]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    references = []
    for folder in folders:
        with suppress(UserError):  # a copy of a folder, say
            references.append(Reference.parse(f"{folder.name.replace('-', '@sha256:')}"))
    return references


@dataclass(frozen=True)
class Task:
    """A pair for an annotator, with the completion that is shown at the left: ``a`` or ``b``."""

    pair: Row
    left: str

    @property
    def right(self) -> str:
        return "b" if self.left == "a" else "a"


class Labelling:
    """The pairs of a round and their answers. Several processes and threads may add answers at once."""

    def __init__(self, folder: Path) -> None:
        """Read the pairs. Raises OSError, and ValueError or KeyError for a damaged file."""
        self.folder = folder
        self._guard = threading.Lock()
        pairs = [json.loads(line) for line in (folder / PAIRS).read_text().split("\n") if line.strip()]
        self.pairs: dict[str, Row] = {pair["id"]: pair for pair in sorted(pairs, key=lambda pair: str(pair["id"]))}
        """By id, in the order in which everybody gets them: ids are digests, so it is random."""
        self._answers: dict[str, dict[str, str]] = {}
        """By annotator and id, the latest one last."""
        self._read_bytes = 0

    @property
    def file(self) -> Path:
        """The file of the answers, as `align labels import` reads it beside the pairs."""
        return self.folder / GIVEN

    def answers(self) -> dict[str, dict[str, str]]:
        """The answers that count, by annotator and by the pair's id, the latest one last."""
        with self._guard:
            self._read()
            return {who: dict(given) for who, given in self._answers.items()}

    def task(self, annotator: str) -> Task | None:
        """The next pair without an answer of the annotator; None if there is none."""
        given = self.answers().get(annotator, {})
        return next((self.task_of(identity, annotator) for identity in self.pairs if identity not in given), None)

    def task_of(self, identity: str, annotator: str) -> Task:
        """The pair with an id as the annotator sees it. Raises UserError."""
        if identity not in self.pairs:
            raise UserError(f"id {identity!r}: this round has no such pair")
        swapped = derive_seed(0, "left", annotator, identity) % 2
        return Task(self.pairs[identity], "b" if swapped else "a")

    def answer(self, annotator: str, identity: str, answer: str) -> None:
        """Keep an answer: it is on the disk when this returns. Raises UserError and OSError."""
        check_name(annotator)
        if answer not in ANSWERS:
            raise UserError(f"answer {answer!r}: one of {', '.join(ANSWERS)} is needed")
        self.task_of(identity, annotator)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"id": identity, QUESTION: answer, "annotator": annotator, "at": at})
        with self._guard:
            _append(self.file, line.encode())

    def latest(self, annotator: str) -> str:
        """The id of the pair that the annotator answered about last; empty if there is none."""
        return next(reversed(self.answers().get(annotator, {})), "")

    def undo(self, annotator: str, identity: str) -> None:
        """Take the annotator's latest answer back, if it is about this pair: a request that comes twice undoes one answer."""
        if identity and identity == self.latest(annotator):
            self.answer(annotator, identity, "undo")

    def agreement(self) -> float | None:
        """Krippendorff's alpha of all annotators, as :func:`agreement_of` has it."""
        answers = self.answers()
        return agreement_of(
            {who: given[identity] for who, given in answers.items() if identity in given} for identity in self.pairs
        )

    def _read(self) -> None:
        """Read the lines that were added since, by this process or another one."""
        for row in self._new_rows():
            given = self._answers.setdefault(row["annotator"], {})
            given.pop(row["id"], None)
            if row[QUESTION] != "undo":
                given[row["id"]] = row[QUESTION]

    def _new_rows(self) -> Iterator[Row]:
        try:
            with self.file.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_bytes:  # it was replaced, by a backup say
                    self._answers, self._read_bytes = {}, 0
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.split(b"\n"):
            try:
                row = json.loads(line)
                if row["id"] in self.pairs and row[QUESTION] in ANSWERS and isinstance(row["annotator"], str):
                    yield row
            except (ValueError, TypeError, KeyError):  # cut off by a kill; the import names it
                continue


def check_name(annotator: str) -> None:
    """Raise UserError for a name that cannot stand for an annotator."""
    if not 0 < len(annotator) <= LONGEST_NAME or " ".join(printable(annotator).split()) != annotator:
        raise UserError(f"annotator: a name of 1 to {LONGEST_NAME} printable characters in one line is needed")


def _append(path: Path, line: bytes) -> None:
    """Add a line, on the disk before this returns; a line that a kill has cut off before it is ended first."""
    with path.open("ab") as file:
        begin = b"" if file.tell() == 0 or _last_byte(path) == b"\n" else b"\n"
        file.write(begin + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def main(uri: str, text: str, most: str = "") -> str | None:
    """Make pairs in a process of its own, since tokenizers take a second and hundreds of megabytes to import; returns what
    is wrong."""
    try:
        make_pairs(open_store(uri, writes=False), Reference.parse(text), int(most) if most else None)
    except (AlignmentError, OSError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
