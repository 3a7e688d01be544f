"""Names that may move, such as tags and branches on the Hub: all attempts of a run use what it first resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class _Names:
    known: dict[str, str]
    save: Callable[[dict[str, str]], None]


_CURRENT: ContextVar[_Names | None] = ContextVar("resolved names", default=None)
"""A context variable, because the run's record is far above the modules that resolve names."""


@contextmanager
def resolving(known: Mapping[str, str], save: Callable[[dict[str, str]], None] = lambda _: None) -> Iterator[None]:
    """Take names from ``known`` inside the block, and ``save`` them all when another one is resolved."""
    token = _CURRENT.set(_Names(dict(known), save))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def known_names() -> dict[str, str]:
    """All names that were resolved so far; empty outside a run."""
    names = _CURRENT.get()
    return dict(names.known) if names else {}


def remember(name: str, resolved: str) -> None:
    """Note what ``name`` stands for in this run. Outside a run, nothing is noted."""
    names = _CURRENT.get()
    if names and names.known.get(name) != resolved:
        names.known[name] = resolved
        names.save(dict(names.known))
