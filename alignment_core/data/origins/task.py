"""`task`: problems of the built-in tasks, as rows of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from alignment_core.data import tasks
from alignment_core.data.origins import DEFAULT_ROWS, LocatedRow, Origin, Pinned, located

if TYPE_CHECKING:
    from alignment_core.data.kinds import Kind
    from alignment_core.recipes.sections.data import DataSource


class Task(Origin):
    """Labels are the right answers; ``verifier: task`` compares with them."""

    description = "Name of a built-in procedural task whose answers can be verified."
    names_tasks = True

    def pin(self, source: DataSource) -> dict[str, Any]:
        tasks.check(str(source.task), source.split, source.options)
        return {}

    def name(self, pinned: Pinned) -> str:
        return f"task:{pinned.source.task}/{pinned.source.split}"

    def content(self, pinned: Pinned) -> dict[str, Any]:
        return {}

    def read(self, pinned: Pinned, seed: int, kind: Kind) -> Iterator[LocatedRow]:
        source = pinned.source
        count = source.rows or DEFAULT_ROWS
        problems = tasks.problems(str(source.task), source.split, count, seed, source.options)
        yield from located(pinned.name, map(kind.of_problem, problems))

    def expected(self, source: DataSource) -> int:
        return source.rows or DEFAULT_ROWS

    def runs_others_code(self, pinned: Pinned) -> bool:
        return False


ORIGIN = Task()
