"""The flows of deployments, all named ``alignment``: they differ only in the recipe of their run form.

``deployed_<name>`` is the flow of a shipped recipe, ``run_<method>`` that of the user's own recipes. Each is built on access,
because building all forms takes longer than a cached stage.
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
    """Method, default recipe and description of the flow of this name."""
    for recipe_file in shipped().values():
        if recipe_file.function == name:
            recipe = recipe_file.recipe()
            return method_of(recipe), recipe, recipe_file.description
    for known in METHODS.names() if name.startswith(OWN) else ():
        if own_flow(known) == name:
            return method(known), REQUIRED, str(method(known).recipe.__doc__)
    return None


def own_flow(method: str) -> str:
    """Name of the flow that runs the user's recipes of a method."""
    return OWN + method.replace("-", "_")


def _function(name: str, method: Method, recipe: Any, description: str) -> Any:
    """A function with the signature from which Prefect builds the run form."""

    def function(
        recipe: BaseRecipe, overrides: list[str] = [], from_stage: str | None = None, **more: Any
    ) -> dict[str, Any]:
        return run_any(recipe, overrides, from_stage, **more)

    signature = inspect.signature(function, eval_str=True)
    first, *others, _ = signature.parameters.values()
    parameters = [first.replace(annotation=method.recipe, default=recipe), *others, *_more(method)]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = description
    return function


def _more(method: Method) -> list[inspect.Parameter]:
    """Further parameters of a method's own ``run``."""
    if (run := method.runner()) is None:
        return []
    parameters = inspect.signature(run, eval_str=True).parameters.values()
    return [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in parameters
        if parameter.name not in ("recipe", "from_stage")
    ]


def __getattr__(name: str) -> Flow[..., Any]:
    if not name.startswith(("deployed_", OWN)) or (form := _form(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    built: Flow[..., Any] = alignment_flow(_function(name, *form))
    globals()[name] = built
    return built
