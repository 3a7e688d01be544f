"""Prompts of `reasoning-gym`, a library of procedural tasks (the extra `environments`), and the content of its labels."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from itertools import count as numbers
from itertools import islice
from typing import TYPE_CHECKING, Any

from alignment_core.canonical import derive_seed
from alignment_core.data.origins import DEFAULT_ROWS, Library, Pinned
from alignment_core.data.tasks import SPLITS, split_of
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.recipes.sections.data import DataSource

FIELD = "reasoning_gym"
BLOCK = 1000
"""Rows generated with one seed; tasks with fewer distinct rows repeat them."""


def library() -> Any:
    """The package. Raises UserError if it is not installed."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise UserError(f"{FIELD}: {error}; install the extra: pip install 'alignment[environments]'") from None
    return reasoning_gym


def version() -> str:
    """Version of the package, which determines rows and scores. Raises as :func:`library` does."""
    library()
    return importlib.metadata.version("reasoning-gym")


def check(name: str, split: str, options: dict[str, Any]) -> None:
    """Raise UserError if there is no such task or split, if it refuses the options, or makes other rows each time."""
    if split not in SPLITS:
        raise UserError(f"{FIELD}: {name!r} has no split {split!r}; choose one of {', '.join(SPLITS)}")
    first, second = (_dataset(name, options, seed=0)[0] for _ in range(2))
    if to_label(name, options, first) != to_label(name, options, second):
        raise UserError(f"{FIELD}: {name!r} gives different rows each time, whatever the seed")


def rows(name: str, split: str, count: int, seed: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``count`` rows with prompt and label. The first n rows of a longer call are the rows of a shorter one.

    No prompt of one split (train or test) occurs in the other, whatever the seed. Raises UserError for a split without
    prompts.
    """
    return islice(_rows_of_split(name, split, seed, options), count)


def _rows_of_split(name: str, split: str, seed: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for block in numbers():
        dataset = _dataset(name, options, derive_seed(seed, FIELD, name, split, block) % 2**31)
        is_empty = True
        for number in range(BLOCK):
            entry = dataset[number]
            if split_of(entry["question"]) == split:
                is_empty = False
                yield {"prompt": entry["question"], "label": to_label(name, options, entry)}
        if is_empty:
            raise UserError(f"{FIELD}: none of {BLOCK} prompts of {name!r} belongs to the split {split!r}")


def _dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    try:
        return library().create_dataset(name, seed=seed, size=BLOCK, **options)
    except UserError:
        raise
    except Exception as error:  # assertions, and any error of a task
        raise UserError(f"{FIELD}: {name!r} with the options {options}: {type(error).__name__}: {error}") from None


def to_label(name: str, options: dict[str, Any], entry: dict[str, Any]) -> str:
    """The JSON text of everything that the scorer needs."""
    return json.dumps({"task": name, "options": options, "entry": _marked(entry)}, ensure_ascii=False)


def from_label(label: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Task, options and entry. Raises ValueError for a label of anything else."""
    try:
        fields = json.loads(label, object_hook=_unmarked)
        return fields["task"], fields["options"], fields["entry"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ValueError(f"{label[:60]!r} is not the label of a `reasoning_gym` row") from None


TUPLE = "(tuple)"


def _marked(value: Any) -> Any:
    """Mark tuples, which JSON does not have: some tasks compare answers with tuples."""
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_marked(item) for item in value]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    return value


def _unmarked(value: dict[str, Any]) -> Any:
    return tuple(value[TUPLE]) if value.keys() == {TUPLE} else value


class ReasoningGym(Library):
    """Labels hold all that the library's scorer needs, which ``verifier: reasoning_gym`` calls."""

    description = (
        "Name of a task of reasoning-gym (extra `environments`), for prompts; scored by `verifier: reasoning_gym`."
    )

    def pin(self, source: DataSource) -> dict[str, Any]:
        check(source.origin, source.split, source.options)
        return {}

    def name(self, pinned: Pinned) -> str:
        return f"{FIELD}:{pinned.source.origin}/{pinned.source.split}"

    def content(self, pinned: Pinned) -> dict[str, Any]:
        return {"version": version()}

    def prompts(self, source: DataSource, seed: int) -> Iterator[dict[str, Any]]:
        return rows(source.origin, source.split, source.rows or DEFAULT_ROWS, seed, source.options)

    def expected(self, source: DataSource) -> int:
        return source.rows or DEFAULT_ROWS


ORIGIN = ReasoningGym()
