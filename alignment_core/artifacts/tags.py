"""Tags: movable names for artifacts, each an append-only log whose next entry only one writer can create."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.checksummed import seal, unseal
from alignment_core.artifacts.paths import TAGS, check_tag, parse_tag_path, tag_path
from alignment_core.artifacts.reference import Reference
from alignment_core.errors import Conflict, Corrupt

_CURE = "put the file back from a copy of the store, or delete it: then the tag is as if it had not been moved so"


class TagMove(BaseModel):
    """One entry of a tag's history."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="the tag, such as policy/production")
    number: int = Field(ge=1, description="1 for the first move; no number is ever skipped or used twice")
    to: Reference = Field(description="the artifact that the tag points to from this move on")
    previous: Reference | None = Field(description="the artifact that it pointed to before; empty for the first move")
    reason: str = Field(description="why the tag was moved")
    back_to: int | None = Field(default=None, ge=1, description="for a rollback: number of the move that it repeats")
    at: str = Field(description="when, ISO 8601 in UTC")


def history(backend: Backend, name: str) -> list[TagMove]:
    """The moves of one tag, oldest first; empty when there is no such tag."""
    return [move for move in _moves(backend, f"{TAGS}{check_tag(name)}/") if move.name == name]


def last(backend: Backend, name: str) -> TagMove | None:
    """The move that says what a tag points to now; None when there is no such tag. Reads that one alone."""
    prefix = f"{TAGS}{check_tag(name)}/"
    paths = [found.path for found in backend.list(prefix) if (parse_tag_path(found.path) or ("",))[0] == name]
    return parse_move(backend.uri, paths[-1], backend.read(paths[-1])) if paths else None


def all_moves(backend: Backend) -> Iterator[TagMove]:
    """Every move of every tag; per tag, oldest first."""
    return _moves(backend, TAGS)


def origin(moves: list[TagMove], move: TagMove) -> TagMove:
    """The move that put ``move.to`` under the tag: ``move`` itself, or the one that it went back to."""
    while move.back_to is not None and move.back_to < move.number:
        move = moves[move.back_to - 1]
    return move


def before(moves: list[TagMove]) -> TagMove | None:
    """The move that a rollback repeats: what the tag named before its present artifact; None when that was the first.

    It is read from the history alone. A rollback is a move like any other, so that the log stays linear, but it notes
    the move that it repeats, and the search starts there instead of at the end. So after A, B, C, a first rollback
    (to B) repeats move 2; a second one starts at move 2, finds move 1 before it, and goes to A, not to C again.
    """
    found = origin(moves, moves[-1])
    while found.number > 1:
        found = origin(moves, moves[found.number - 2])
        if found.to != moves[-1].to:
            return found
    return None


def move(
    backend: Backend,
    name: str,
    to: Reference,
    expected: Reference | None,
    reason: str,
    back_to: int | None = None,
) -> TagMove:
    """Compare and set. Raises Conflict when the tag does not name ``expected`` (any more)."""
    latest = last(backend, name)
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
        )
        if backend.put(tag_path(name, entry.number), seal(entry)):
            return entry
        latest = last(backend, name)
        current = latest.to if latest else None
    raise Conflict(
        f"the tag {name} points to {current.short if current else 'nothing'} instead of the expected "
        f"{expected.short if expected else 'nothing'}: check its history (`align tags history`) and decide again"
    )


def parse_move(uri: str, path: str, data: bytes) -> TagMove:
    """The move that the store ``uri`` has at ``path``. Raises Corrupt for anything else."""
    try:
        move = unseal(TagMove, data)
    except ValueError as error:
        raise Corrupt(f"{path} in {uri} is not a tag move: {error}; {_CURE}") from error
    if (move.name, move.number) != parse_tag_path(path):
        raise Corrupt(f"{path} in {uri} holds move {move.number} of the tag {move.name}; {_CURE}")
    return move


def _moves(backend: Backend, prefix: str) -> Iterator[TagMove]:
    for found in backend.list(prefix):
        if parse_tag_path(found.path) is not None:
            yield parse_move(backend.uri, found.path, backend.read(found.path))
