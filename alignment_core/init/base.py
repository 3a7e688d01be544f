"""The profile of rows, model and machine by which a method writes a first recipe, and the methods that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.init.guess import ColumnMapping
from alignment_core.init.held_out import HeldOut
from alignment_core.init.lengths import Lengths
from alignment_core.init.machine import Machine
from alignment_core.init.models import Model
from alignment_core.init.rows import Rows
from alignment_core.recipes import methods
from alignment_core.recipes.methods import Init


@dataclass(frozen=True)
class Profile:
    """Everything that was found out about the rows, the model and the machine."""

    name: str
    """Of the recipe."""
    rows: Rows
    mapping: ColumnMapping
    sources: list[dict[str, Any]]
    """The rows to train on, as sources of a recipe."""
    held_out: HeldOut
    model: Model
    machine: Machine
    lengths: Lengths
    verifier: str | None
    """The verifier of answers, if the rows have labels for one."""
    rewards: Sequence[str] = ()
    """Reward functions by their names in the recipe."""

    @property
    def all_sources(self) -> list[dict[str, Any]]:
        """The rows to train on, and the held-out ones, whose prompts training data must not repeat."""
        return [*self.sources, *({**source, "held_out": True} for source in self.held_out.sources)]


def loaded() -> dict[str, Init]:
    """How each method that has an ``init`` writes a first recipe, by the method's name."""
    return {method.name: method.init for method in methods.loaded()[0] if method.init is not None}
