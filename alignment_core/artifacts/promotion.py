"""Moving a tag by hand: forward to an artifact, or back to the one that it pointed to before."""

from __future__ import annotations

from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.tag_history import TagMove, before, origin
from alignment_core.errors import MAKE_IT_AGAIN, NotFound, StoreError, UnknownName, UserError


def promote(store: Store, name: str, to: Reference, expected: Reference | None, reason: str) -> TagMove:
    """Move a tag from ``expected`` (None: the tag is new) to the whole artifact ``to``.

    Makes no move, and returns the last one, if the tag already points to ``to`` and that is ``expected``. Raises Conflict
    when the tag points to another artifact by now, UserError when ``to`` is of another kind than the tag's artifact,
    StoreError when its bytes are not whole.
    """
    moves = store.tags.history(name)
    if moves and moves[-1].to.kind != to.kind:
        raise UserError(
            f"the tag {name} points to a {moves[-1].to.kind}, but {to.short} is a {to.kind}: give a "
            f"{moves[-1].to.kind}, or another tag"
        )
    _check_whole(store, to)
    if moves and moves[-1].to == to == expected:
        return moves[-1]
    return store.tags.move(name, to, expected, reason)


def rollback(store: Store, name: str, number: int | None = None, reason: str = "") -> TagMove:
    """Move a tag back to the artifact before its present one, or to the artifact of move ``number``.

    The history only grows: the rollback is a new move, which notes the one that it repeats (:func:`before` says
    how several in a row go further back). Raises UnknownName for an unknown tag, UserError when there is nothing to go
    back to, StoreError when the bytes of that artifact are not whole, Conflict when another writer moves the tag.
    """
    moves = store.tags.history(name)
    if not moves:
        raise UnknownName(
            f"there is no tag {name} in {store.uri} (there are: {', '.join(sorted(store.tags.all())) or 'none'})"
        )
    present = moves[-1].to
    if number is None:
        target = before(moves)
        if target is None:
            raise UserError(
                f"the tag {name} pointed to nothing before {present.short}: there is nothing to roll back to"
            )
    elif 1 <= number <= len(moves):
        target = origin(moves, moves[number - 1])
    else:
        raise UserError(f"the tag {name} has no move {number}: its history has the moves 1 to {len(moves)}")
    if target.to == present:
        raise UserError(
            f"move {number} of the tag {name} points to {present.short}, as the tag does now: nothing to do"
        )
    _check_whole(store, target.to)
    summary = f"rolled back to move {target.number}" + (f": {reason}" if reason else "")
    return store.tags.move(name, target.to, present, summary, back_to=target.number)


def _check_whole(store: Store, reference: Reference) -> None:
    """Read every byte. Raises NotFound if the artifact is missing or was pruned, StoreError if it is damaged."""
    store.manifest(reference)
    if store.is_pruned(reference):
        raise NotFound(f"the bytes of {reference.short} were pruned; {MAKE_IT_AGAIN}")
    problems = store.verify(reference)
    if problems:
        raise StoreError(f"{reference.short} is damaged, so the tag was not moved: {'; '.join(problems)}")
