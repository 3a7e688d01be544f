"""The user's own flows, ``file.py`` and ``file.py:flow``, for ``align run`` and ``align deploy``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from alignment_core.credentials import refuse_literals
from alignment_core.errors import UserError

SUFFIX = ".py"
OF_RECIPES = "--{} is for recipes: give your own flow a parameter for it, and set that with --set"


def is_flow_file(given: Path) -> bool:
    """Whether this is a Python file, or a function in one."""
    return given.name.partition(":")[0].endswith(SUFFIX)


def load_flow(given: str) -> Any:
    """The flow ``file.py:name``, or the only flow that ``file.py`` defines. Raises UserError if there is none."""
    from prefect import Flow
    from prefect.exceptions import ScriptError
    from prefect.utilities.importtools import load_script_as_module

    file, name = (given, "") if given.endswith(SUFFIX) else given.rsplit(":", 1)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file")
    try:
        module = load_script_as_module(file)
    except ScriptError as error:
        cause = error.user_exc
        raise UserError(f"{file} does not load: {type(cause).__name__}: {cause}") from cause
    flows = {variable: value for variable, value in vars(module).items() if isinstance(value, Flow)}
    own = {variable: flow for variable, flow in flows.items() if flow.fn.__module__ == module.__name__}
    chosen = flows.get(name) if name else next(iter(own.values()), None) if len(own) == 1 else None
    if chosen is None:
        listed = ", ".join(f"{file}:{variable}" for variable in own) or "none"
        problem = f"it has no flow {name!r}" if name else f"name the flow, as in {file}:NAME"
        raise UserError(f"{file}: {problem}; there are {listed}")
    return chosen


def parameters_of(flow: Any, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The flow's defaults, changed by texts such as ``betas=[0.1, 0.3]`` and ``settings.seed=2``, by parameter.

    Raises UserError for a parameter that the flow does not have, or a value that does not fit.
    """
    from pydantic import BaseModel

    from alignment_core.recipes import apply_overrides
    from alignment_core.recipes.paths import with_numbers

    known = inspect.signature(flow.fn).parameters
    changed_names = {override.partition("=")[0].partition(".")[0].strip() for override in overrides}
    if unknown := changed_names - known.keys():
        raise UserError(
            f"--set {sorted(unknown)[0]}: the flow has no such parameter; it has {', '.join(known) or 'none'}"
        )
    defaults = {
        name: known[name].default for name in changed_names if known[name].default is not inspect.Parameter.empty
    }
    plain = {
        name: value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in defaults.items()
    }
    changed: dict[str, Any] = with_numbers(apply_overrides(plain, overrides))
    return changed


def checked(flow: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The validated parameters. Raises UserError with all mistakes."""
    from prefect.exceptions import ParameterBindError, ParameterTypeError, SignatureMismatchError

    try:
        validated: dict[str, Any] = flow.validate_parameters(dict(parameters))
        inspect.signature(flow.fn).bind(**validated)
    except (ParameterTypeError, ParameterBindError, SignatureMismatchError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the parameters of the flow {flow.name!r}: {reason}; give them with --set name=value"
        ) from None
    refuse_literals(to_jsonable_python(validated, fallback=str), f"the parameters of the flow {flow.name!r}")
    return validated
