"""The history of a tag: its moves, each of which is one object of the store, and the target of a rollback."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from alignment_core.artifacts.checksummed import Sealed, unseal
from alignment_core.artifacts.paths import parse_tag_path
from alignment_core.artifacts.reference import Reference
from alignment_core.errors import Corrupt

_CURE = "restore the file from a copy of the store, or delete it, which undoes this move of the tag"


class TagMove(Sealed):
    """One entry of a tag's history."""

    ADDED = ("decision", "by")

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="the tag, such as policy/production")
    number: int = Field(ge=1, description="1 for the first move; no number is ever skipped or used twice")
    to: Reference = Field(description="the artifact that the tag points to from this move on")
    previous: Reference | None = Field(description="the artifact that it pointed to before; empty for the first move")
    reason: str = Field(description="why the tag was moved")
    back_to: int | None = Field(default=None, ge=1, description="for a rollback: number of the move that it repeats")
    at: str = Field(description="when, ISO 8601 in UTC")
    decision: Reference | None = Field(default=None, description="the decision that it follows; empty if moved by hand")
    by: str = Field(default="", description="who moved it: a run, or a user and a machine")


def origin(moves: list[TagMove], move: TagMove) -> TagMove:
    """The move that put ``move.to`` under the tag: ``move`` itself, or the one that it went back to."""
    by_number = {earlier.number: earlier for earlier in moves if earlier.number < move.number}
    while move.back_to in by_number:
        move = by_number.pop(move.back_to)
    return move


def before(moves: list[TagMove]) -> TagMove | None:
    """The move that a rollback repeats, to the artifact before the present one; None when that is the first.

    It is read from the history alone. A rollback is a move like any other, so that the log stays linear, but it notes
    the move that it repeats, and the search starts there instead of at the end. So after A, B, C, a first rollback
    (to B) repeats move 2; a second one starts at move 2, finds move 1 before it, and goes to A, not to C again.
    """
    candidate = origin(moves, moves[-1])
    while earlier := [move for move in moves if move.number < candidate.number]:  # the file of a move may be deleted
        candidate = origin(moves, earlier[-1])
        if candidate.to != moves[-1].to:
            return candidate
    return None


def parse_move(uri: str, path: str, data: bytes) -> TagMove:
    """The move that the store ``uri`` has at ``path``. Raises Corrupt for anything else."""
    try:
        move = unseal(TagMove, data)
    except ValueError as error:
        raise Corrupt(f"{path} in {uri} is not a tag move: {error}; {_CURE}") from error
    if (move.name, move.number) != parse_tag_path(path):
        raise Corrupt(f"{path} in {uri} holds move {move.number} of the tag {move.name}; {_CURE}")
    return move
