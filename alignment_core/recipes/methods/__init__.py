"""The methods: a module for each of ours, and those of installed distributions.

One more is a module here, or an entry point of the group ``alignment.methods``; nothing lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from alignment_core.errors import UserError
from alignment_core.plugins import Group
from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe

METHODS = Group(
    "alignment.methods", "alignment_core.recipes.methods", "METHOD", "method", "alignment_core.recipes.method:Method"
)


def method(name: str) -> Method:
    """The method that recipes call ``name``. Raises UserError if there is none, or if its code does not load."""
    return _named(name, METHODS.load(name))


def _named(name: str, found: Method) -> Method:
    if found.name != name:
        raise UserError(f"the method {name!r} ({METHODS.targets()[name]}) is called {found.name!r} by its recipe")
    return found


def method_of(recipe: BaseRecipe) -> Method:
    """The method of a recipe."""
    return method(recipe.method)


def loaded() -> tuple[list[Method], list[str]]:
    """All methods that load, and a sentence for each that does not."""
    found = []
    plugins, problems = METHODS.loaded()
    for name, one in plugins.items():
        try:
            found.append(_named(name, one))
        except UserError as error:
            problems.append(str(error))
    return found, problems


def decides(label: str, path: str) -> str | None:
    """The recipe's field that decides ``path`` of the configuration of the stage ``label``; None if no method says."""
    for pattern, field in _decides():
        if ":" in pattern and re.fullmatch(pattern, f"{label}:{path}"):
            return field
        if ":" not in pattern and re.fullmatch(pattern, label):
            return f"{field}.{path.removeprefix('data.')}"  # the stage that prepares rows has the recipe's section as `data`
    return None


def _decides() -> Iterator[tuple[str, str]]:
    for one in loaded()[0]:
        yield from one.decides.items()
    yield from COMMON.items()


COMMON = {
    "model": "model",
    "evaluation/prompts": "evaluation.prompts",
    r"evaluation/reward-\d+:.*": "evaluation.rewards",
    "evaluation/judge:.*": "evaluation.judge",
    r".*/evaluation(/\w+)?": "evaluation",
}
"""As :attr:`Method.decides`, of stages that several methods have."""
