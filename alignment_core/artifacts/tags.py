"""Tags: movable names for artifacts, each an append-only log whose next entry only one writer can create."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.checksummed import seal
from alignment_core.artifacts.index import Index
from alignment_core.artifacts.manifest import read_manifest
from alignment_core.artifacts.paths import TAGS, check_tag, parse_tag_path, tag_path
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.tag_history import TagMove, parse_move
from alignment_core.errors import Conflict


def _user() -> str:
    try:
        return f"{getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # a user without a name, as in a container
        return f"user {os.getuid()} on {socket.gethostname()}"


class Tags:
    """The tags of one store."""

    def __init__(self, backend: Backend, index: Index) -> None:
        self.backend = backend
        self.index = index

    def get(self, name: str) -> Reference | None:
        """The artifact that a tag points to; None when there is no such tag."""
        latest = self.last(name)
        return latest.to if latest else None

    def all(self) -> dict[str, Reference]:
        """Every tag and the artifact that it points to."""
        with self.index.view(TAGS) as view:
            return {move.name: move.to for move in view.moves()}

    def history(self, name: str) -> list[TagMove]:
        """The moves of a tag, oldest first; empty when there is no such tag."""
        with self.index.view(f"{TAGS}{check_tag(name)}/") as view:
            return [move for move in view.moves() if move.name == name]

    def last(self, name: str) -> TagMove | None:
        """The latest move of a tag; None when there is no such tag. Reads no other move."""
        prefix = f"{TAGS}{check_tag(name)}/"
        paths = [
            stored.path for stored in self.backend.list(prefix) if (parse_tag_path(stored.path) or ("",))[0] == name
        ]
        return parse_move(self.backend.uri, paths[-1], self.backend.read(paths[-1])) if paths else None

    def moves(self) -> Iterator[TagMove]:
        """Every move of every tag, read from the store without the index; per tag, oldest first."""
        for stored in self.backend.list(TAGS):
            if parse_tag_path(stored.path) is not None:
                yield parse_move(self.backend.uri, stored.path, self.backend.read(stored.path))

    def move(
        self,
        name: str,
        to: Reference,
        expected: Reference | None,
        reason: str,
        back_to: int | None = None,
        decision: Reference | None = None,
        by: str = "",
    ) -> TagMove:
        """Move a tag from ``expected`` (None: the tag is new) to ``to``; of several writers one wins (compare and set).

        ``back_to`` is the number of the move that a rollback repeats, ``decision`` the artifact with the reasons, ``by`` who
        moves it, by default the user of this process. Raises Conflict when the tag does not point to
        ``expected`` (any more), NotFound when ``to`` is not in the store.
        """
        read_manifest(self.backend, to)
        latest = self.last(name)
        current = latest.to if latest else None
        if current == expected:
            entry = TagMove(
                name=name,
                number=latest.number + 1 if latest else 1,
                to=to,
                previous=expected,
                reason=reason,
                at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                back_to=back_to,
                decision=decision,
                by=by or _user(),
            )
            # Creating the object of the next number is the compare-and-set: of several writers one creates it.
            if self.backend.put(tag_path(name, entry.number), seal(entry)):
                return entry
            current = self.get(name)
        raise Conflict(
            f"the tag {name} points to {current.short if current else 'nothing'} instead of the expected "
            f"{expected.short if expected else 'nothing'}: check its history (`align tags history`) and decide again"
        )
