"""Running a flow of a user's own from its file: what ``align run`` does with ``file.py`` and ``file.py:flow``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from alignment_core.credentials import refuse_literals
from alignment_core.errors import UserError

SUFFIX = ".py"
OF_RECIPES = "--{}: a flow of your own takes it as a parameter of its own, or not at all"


def is_flow_file(given: Path) -> bool:
    """Whether somebody names a flow of their own: a file of Python, or a function in it."""
    return given.name.partition(":")[0].endswith(SUFFIX)


def load_flow(given: str) -> Any:
    """The flow ``file.py:name``, or the only one that ``file.py`` defines. Raises UserError."""
    from prefect import Flow
    from prefect.exceptions import ScriptError
    from prefect.utilities.importtools import load_script_as_module

    file, name = (given, "") if given.endswith(SUFFIX) else given.rsplit(":", 1)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file")
    try:
        module = load_script_as_module(file)
    except ScriptError as error:
        why = error.user_exc
        raise UserError(f"{file} does not load: {type(why).__name__}: {why}") from why
    flows = {one: value for one, value in vars(module).items() if isinstance(value, Flow)}
    own = {one: value for one, value in flows.items() if value.fn.__module__ == module.__name__}
    chosen = flows.get(name) if name else next(iter(own.values()), None) if len(own) == 1 else None
    if chosen is None:
        there = ", ".join(f"{file}:{one}" for one in own) or "none"
        what = f"it has no flow {name!r}" if name else f"name the flow, as in {file}:NAME"
        raise UserError(f"{file}: {what}; there are {there}")
    return chosen


def parameters_of(flow: Any, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Parameters by name from texts such as ``betas=[0.1, 0.3]`` and ``settings.seed=2``, which change the flow's defaults.

    Raises UserError for a parameter that it does not have, or that does not fit.
    """
    from pydantic import BaseModel

    from alignment_core.recipes import apply_overrides
    from alignment_core.recipes.paths import with_numbers

    known = inspect.signature(flow.fn).parameters
    asked = {one.partition("=")[0].partition(".")[0].strip() for one in overrides}
    if unknown := asked - known.keys():
        raise UserError(
            f"--set {sorted(unknown)[0]}: the flow has no such parameter; it has {', '.join(known) or 'none'}"
        )
    defaults = {name: known[name].default for name in asked if known[name].default is not inspect.Parameter.empty}
    plain = {
        name: one.model_dump(mode="json", exclude_unset=True) if isinstance(one, BaseModel) else one
        for name, one in defaults.items()
    }
    changed: dict[str, Any] = with_numbers(apply_overrides(plain, overrides))
    return changed


def checked(flow: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as the flow takes them. Raises UserError with a line per mistake."""
    from prefect.exceptions import ParameterBindError, ParameterTypeError, SignatureMismatchError

    try:
        found: dict[str, Any] = flow.validate_parameters(dict(parameters))
        inspect.signature(flow.fn).bind(**found)
    except (ParameterTypeError, ParameterBindError, SignatureMismatchError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"the parameters of the flow {flow.name!r}: {why}; give them with --set name=value") from None
    refuse_literals(to_jsonable_python(found, fallback=str), f"the parameters of the flow {flow.name!r}")
    return found
