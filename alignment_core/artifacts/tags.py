"""Tags: movable names for artifacts, each an append-only log whose next entry only one writer can create."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.paths import TAGS, check_tag, parse_tag_path, tag_path
from alignment_core.artifacts.reference import Reference
from alignment_core.errors import Conflict, Corrupt


class TagMove(BaseModel):
    """One entry of a tag's history."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="the tag, such as policy/production")
    number: int = Field(ge=1, description="1 for the first move; no number is ever skipped or used twice")
    to: Reference = Field(description="the artifact that the tag names from this move on")
    previous: Reference | None = Field(description="the artifact that it named before; empty for the first move")
    reason: str = Field(description="why the tag was moved")
    at: str = Field(description="when, ISO 8601 in UTC")


def history(backend: Backend, name: str) -> list[TagMove]:
    """The moves of one tag, oldest first; empty when there is no such tag."""
    return [move for move in _moves(backend, f"{TAGS}{check_tag(name)}/") if move.name == name]


def all_moves(backend: Backend) -> Iterator[TagMove]:
    """Every move of every tag; per tag, oldest first."""
    return _moves(backend, TAGS)


def move(backend: Backend, name: str, to: Reference, expected: Reference | None, reason: str) -> TagMove:
    """Compare and set. Raises Conflict when the tag does not name ``expected`` (any more)."""
    moves = history(backend, name)
    current = moves[-1].to if moves else None
    if current == expected:
        entry = TagMove(
            name=name,
            number=moves[-1].number + 1 if moves else 1,
            to=to,
            previous=expected,
            reason=reason,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        if backend.put_new(tag_path(name, entry.number), entry.model_dump_json(indent=2).encode()):
            return entry
        current = history(backend, name)[-1].to
    raise Conflict(
        f"the tag {name} now names {current.short if current else 'nothing'}, not the expected "
        f"{expected.short if expected else 'nothing'}: look at its history and decide again"
    )


def _moves(backend: Backend, prefix: str) -> Iterator[TagMove]:
    for found in backend.list(prefix):
        parsed = parse_tag_path(found.path)
        if parsed is None:
            continue
        try:
            move = TagMove.model_validate_json(backend.read(found.path))
        except ValidationError as error:
            raise Corrupt(f"{found.path} in {backend.uri} is not a tag move: {error}") from error
        if (move.name, move.number) != parsed:
            raise Corrupt(f"{found.path} in {backend.uri} holds move {move.number} of the tag {move.name}")
        yield move
