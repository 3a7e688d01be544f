"""What a method is, and the methods that are installed: ours in :mod:`alignment_core.methods`, and those of distributions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.errors import UserError
from alignment_core.plugins import Group, resolve
from alignment_core.recipes.recipe import BaseRecipe


@dataclass(frozen=True)
class Init:
    """How ``align init`` writes a first recipe of a method."""

    kinds: tuple[str, ...]
    """Kinds of rows that the method can learn from, the best first."""
    sections: Callable[[Any], dict[str, Any]]
    """The method's sections of the recipe, by an :class:`alignment_core.init.base.Profile` of rows, model and machine. Raises
    UserError if the rows lack something."""
    why: str
    """Words for the rows that explain the choice of this method."""
    rank: int | None = None
    """Its place among the methods that are tried if no method was named. Default: it is not tried."""
    formats: tuple[str, ...] = ()
    """Formats of rows for which it is tried."""
    fits: Callable[[Sequence[Mapping[str, Any]], Any], bool] = lambda rows, mapping: True
    """Whether it is tried for these rows, by the :class:`alignment_core.init.guess.ColumnMapping` of their columns."""
    others: tuple[str, ...] = ()
    """Aliases of the method for settings that ``sections`` does not write."""
    instead: str = ""
    """What to do for these."""
    evaluates: bool = True
    """Whether its policies are evaluated on held-out prompts."""
    promotes: bool = True
    """Whether it trains a policy, which gets a tag."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of its kind of rows beside the data."""


@dataclass(frozen=True)
class Method:
    """A method: its recipe, its composition, and its place in other commands. Its module holds it as ``METHOD``."""

    recipe: type[BaseRecipe]
    """Its recipes. The default of their field ``method`` is the method's name."""
    compose: Callable[[Any], Any]
    """Submits the stages of a recipe, and returns :class:`alignment_core.composition.results.Outputs`."""
    run: str | None = None
    """``module:function`` that runs a recipe if a run is more than its composition. It takes the recipe, ``from_stage``, and
    further parameters, which become fields of a deployment's form. Plans show the composition."""
    decides: Mapping[str, str] = field(default_factory=dict)
    """The recipe's field that decides a stage, by a pattern of the stage's label, or of the label and a field of the stage's
    configuration with ``:`` between them. Explanations of why a stage runs name this field; the first match counts."""
    aliases: tuple[str, ...] = ()
    """Other names of the method."""
    cron: str | None = None
    """When the deployments of its shipped recipes run by themselves, in UTC. Default: only when somebody starts them."""
    init: Init | None = None
    """How ``align init`` writes a first recipe. Default: it does not."""

    def __post_init__(self) -> None:
        if not issubclass(self.recipe, BaseRecipe) or not isinstance(self.recipe.model_fields["method"].default, str):
            raise TypeError(
                f"{self.recipe.__name__} is not a BaseRecipe whose field `method` has a default, the method's name"
            )

    @property
    def name(self) -> str:
        """Its name in recipes."""
        return str(self.recipe.model_fields["method"].default)

    def runner(self) -> Callable[..., Any] | None:
        """The function that ``run`` names. Its module is imported now."""
        return resolve(self.run) if self.run else None


METHODS = Group(
    "alignment.methods", "alignment_core.methods", "METHOD", "method", "alignment_core.recipes.methods:Method"
)
"""The modules are found by name and imported when a recipe names them, because they import recipes and stages themselves."""


def method(name: str) -> Method:
    """The method that recipes call ``name``. Raises UserError if there is none, or if its code does not load."""
    return _named(name, METHODS.load(name))


def _named(name: str, loaded: Method) -> Method:
    if loaded.name != name:
        raise UserError(f"the method {name!r} ({METHODS.targets()[name]}) is called {loaded.name!r} by its recipe")
    return loaded


def method_of(recipe: BaseRecipe) -> Method:
    """The method of a recipe."""
    return method(recipe.method)


def loaded() -> tuple[list[Method], list[str]]:
    """All methods that load, and a sentence for each that does not."""
    methods = []
    plugins, problems = METHODS.loaded()
    for name, plugin in plugins.items():
        try:
            methods.append(_named(name, plugin))
        except UserError as error:
            problems.append(str(error))
    return methods, problems


def decides(label: str, path: str) -> str | None:
    """The recipe's field that decides ``path`` of the configuration of the stage ``label``; None if no method says."""
    for pattern, field_name in _decides():
        if ":" in pattern and re.fullmatch(pattern, f"{label}:{path}"):
            return field_name
        if ":" not in pattern and re.fullmatch(pattern, label):
            return (
                f"{field_name}.{path.removeprefix('data.')}"  # the stage `dataset` has the recipe's section as `data`
            )
    return None


def _decides() -> Iterator[tuple[str, str]]:
    for method in loaded()[0]:
        yield from method.decides.items()
    yield from COMMON.items()


COMMON = {
    "model": "model",
    "evaluation/prompts": "evaluation.prompts",
    r"evaluation/reward-\d+:.*": "evaluation.rewards",
    "evaluation/judge-model:.*": "evaluation.judge",
    r".*/evaluation(/\w+)?": "evaluation",
}
"""As :attr:`Method.decides`, of stages that several methods have."""
