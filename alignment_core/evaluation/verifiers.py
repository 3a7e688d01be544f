"""Verifiers: a Python function that scores one completion in [0, 1], given by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError

Verifier = Callable[[str, str, str | None], float]
TASK = "task"
FIELD = "evaluation.verifier"


def load_verifier(name: str, field: str = FIELD) -> Verifier:
    """``module:function`` or ``file.py:function`` → a function of (prompt, completion, label).

    Raises UserError if there is no such function; ``field`` is where the recipe names it.
    """
    place, separator, function = name.rpartition(":")
    if not separator or not place:
        raise UserError(f"{field}: {name!r} is neither `task` nor `module:function` nor `file.py:function`")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, function)
    except Exception as error:  # the user's code runs here
        raise UserError(f"{field}: {name!r} cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise UserError(f"{field}: {name!r} is no function")
    return found


def verifier_content(name: str, field: str = FIELD) -> dict[str, str]:
    """What a verifier is, for stage keys: the built-in one, or a function's name and the SHA-256 of its file."""
    if name == TASK:
        return {"name": TASK}
    try:
        source = inspect.getsourcefile(inspect.unwrap(load_verifier(name, field)))
    except TypeError:
        raise UserError(f"{field}: {name!r} has no Python source; name a function written in Python") from None
    return {"name": name.rpartition(":")[2], "sha256": hashlib.sha256(Path(str(source)).read_bytes()).hexdigest()}


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"verifier_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
