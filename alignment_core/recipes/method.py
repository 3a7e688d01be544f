"""What a method is: a recipe of its own, and the composition that makes stages of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from alignment_core.plugins import resolve
from alignment_core.recipes.recipe import BaseRecipe


@dataclass(frozen=True)
class Method:
    """All that the flows know of a method. A module below :mod:`alignment_core.recipes.methods` holds it as ``METHOD``."""

    recipe: type[BaseRecipe]
    """Its recipes. The default of their field ``method`` is the method's name."""
    composition: str
    """``module:function`` that takes a recipe, submits its stages and returns :class:`alignment.flows.results.Outputs`."""
    run: str | None = None
    """``module:function`` that runs a recipe where there is more to it than its composition: it takes the recipe,
    ``from_stage``, and what else a deployment's form should ask for. Plans then show the composition."""
    decides: Mapping[str, str] = field(default_factory=dict)
    """The field of the recipe that decides a stage, by a pattern of the stage's label, or of the label and a field of the
    stage's configuration with ``:`` between them. What says why a stage runs names it so; the first match counts."""
    aliases: tuple[str, ...] = ()
    """What else people call it, or what it does."""
    cron: str | None = None
    """When the deployments of its shipped recipes run by themselves, in UTC. Default: only when somebody starts them."""

    def __post_init__(self) -> None:
        if not issubclass(self.recipe, BaseRecipe) or not isinstance(self.recipe.model_fields["method"].default, str):
            raise TypeError(
                f"{self.recipe.__name__} is not a BaseRecipe whose field `method` has a default, the method's name"
            )

    @property
    def name(self) -> str:
        """What recipes call it."""
        return str(self.recipe.model_fields["method"].default)

    def compose(self) -> Callable[[Any], Any]:
        """The composition. Its module is imported now."""
        return resolve(self.composition)

    def runner(self) -> Callable[..., Any] | None:
        """What runs a recipe, if not simply its composition."""
        return resolve(self.run) if self.run else None
