"""What a method needs to begin with somebody's rows: a :class:`Start`, a plug-in of its own (group ``alignment.starts``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.init.guess import ColumnMapping
from alignment_core.init.lengths import Lengths
from alignment_core.init.machine import Machine
from alignment_core.init.models import Model
from alignment_core.init.rows import Rows
from alignment_core.plugins import Group

STARTS = Group(
    "alignment.starts",
    "alignment_core.init.methods",
    "START",
    "start of a method",
    "alignment_core.init.base:Start",
)


@dataclass(frozen=True)
class Profile:
    """All that was found out."""

    name: str
    """Of the recipe."""
    rows: Rows
    reading: ColumnMapping
    sources: list[dict[str, Any]]
    """The rows to train on, as a recipe has them."""
    tests: list[dict[str, Any]]
    """Rows to measure on, which nothing trains on; empty where there are too few to keep some apart."""
    prompts: list[dict[str, Any]]
    """The same as prompts that policies are to answer."""
    model: Model
    machine: Machine
    lengths: Lengths
    verifier: str | None
    """What says whether an answer is right, where the rows have labels for it."""
    test_rows: int = 0
    """How many rows to hold out where they have no file of their own."""
    rewards: Sequence[str] = ()
    """Reward functions, as the recipe names them."""

    @property
    def all_sources(self) -> list[dict[str, Any]]:
        """The rows to train on, and those that are held out, which no prompt of the former may repeat."""
        return [*self.sources, *({**one, "held_out": True} for one in self.tests)]


@dataclass(frozen=True)
class Start:
    """How a method begins. The module with its name below :mod:`alignment_core.init.methods` holds it as ``START``."""

    kinds: tuple[str, ...]
    """Kinds of rows that it can take, the best first."""
    sections: Callable[[Profile], dict[str, Any]]
    """Its own sections of the recipe. Raises UserError where the rows lack something."""
    why: str
    """What the rows are, in words that explain the method."""
    rank: int | None = None
    """Its place among the methods that are tried when nobody names one; None: it is not."""
    formats: tuple[str, ...] = ()
    """Formats that speak for it then."""
    fits: Callable[[Sequence[Mapping[str, Any]], ColumnMapping], bool] = lambda rows, reading: True
    """Whether these rows speak for it then."""
    others: tuple[str, ...] = ()
    """Aliases of the method for settings that this start does not write."""
    instead: str = ""
    """What to do for these."""
    learns: bool = True
    """Whether rows of several columns are learned from."""
    evaluates: bool = True
    """Whether its policies answer held-out prompts."""
    promotes: bool = True
    """Whether it makes a policy, which gets a tag."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its kind of rows is told beside the data."""


def loaded() -> dict[str, Start]:
    """The starts of all methods that have one, by the method's name."""
    found: dict[str, Start] = STARTS.loaded()[0]
    return found


def by_rank() -> list[tuple[str, Start]]:
    """Those that are tried when nobody names a method, in their order."""
    ranked = [(name, start) for name, start in loaded().items() if start.rank is not None]
    return sorted(ranked, key=lambda one: one[1].rank or 0)
