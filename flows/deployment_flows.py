"""The deployments' flows, all named ``alignment``: they differ only in the recipe that their form asks for.

``deployed_<name>`` is the flow of a shipped recipe, ``run_<method>`` that of the user's own recipes. Each is made when somebody
asks this module for it: making the forms of all takes longer than a cached stage.
"""

from __future__ import annotations

import inspect
from typing import Any

from prefect import Flow

from alignment.flows.recipe_flow import alignment_flow, run_any
from alignment.flows.shipped_recipes import shipped
from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.methods import METHODS, Method, method, method_of

REQUIRED = inspect.Parameter.empty
OWN = "run_"


def _form(name: str) -> tuple[Method, Any, str] | None:
    """The method that the flow's form is for, the recipe that it shows, and what the flow does."""
    for one in shipped().values():
        if one.function == name:
            recipe = one.recipe()
            return method_of(recipe), recipe, one.description
    for known in METHODS.names() if name.startswith(OWN) else ():
        if own_flow(known) == name:
            found = method(known)
            return found, REQUIRED, str(found.recipe.__doc__)
    return None


def own_flow(method: str) -> str:
    """What the flow of recipes of one's own is called here, by their method."""
    return OWN + method.replace("-", "_")


def _function(name: str, method: Method, recipe: Any, description: str) -> Any:
    """A function with the signature that Prefect makes the form of."""

    def function(
        recipe: BaseRecipe, overrides: list[str] = [], from_stage: str | None = None, **more: Any
    ) -> dict[str, Any]:
        return run_any(recipe, overrides, from_stage, **more)

    signature = inspect.signature(function, eval_str=True)
    first, *others, _ = signature.parameters.values()
    asked = [first.replace(annotation=method.recipe, default=recipe), *others, *_more(method)]
    vars(function)["__signature__"] = signature.replace(parameters=asked)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = description
    return function


def _more(method: Method) -> list[inspect.Parameter]:
    """What the form of a method asks for besides."""
    if (run := method.runner()) is None:
        return []
    given = inspect.signature(run, eval_str=True).parameters.values()
    return [one.replace(kind=one.KEYWORD_ONLY) for one in given if one.name not in ("recipe", "from_stage")]


def __getattr__(name: str) -> Flow[..., Any]:
    if not name.startswith(("deployed_", OWN)) or (form := _form(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made: Flow[..., Any] = alignment_flow(_function(name, *form))
    globals()[name] = made
    return made
