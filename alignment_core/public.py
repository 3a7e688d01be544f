"""Packages whose names are listed in a stub, ``__init__.pyi``, and imported when they are first used.

The names of ``alignment``, the one import of users' flows and plug-ins, are read here, because stage keys need them too: a
plug-in that imports a name from ``alignment`` computes with the module that defines it. (``lazy-loader`` reads stubs as well,
but only of names that are defined below the package.)
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FACADE = "alignment"
STUB = Path(__file__).parents[1] / FACADE / "__init__.pyi"


def names_in(stub: Path) -> dict[str, str]:
    """The module that defines each name, by the imports of a stub."""
    imports = (node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``, which imports a name's module when the name is first used."""

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(module_of[name]), name)
        except AttributeError as error:
            # Python would take it for a missing name, and hide why the module does not load.
            raise ImportError(f"{module_of[name]} does not load: AttributeError: {error}") from error
        setattr(sys.modules[package], name, value)
        return value

    return load


MODULE_OF: Mapping[str, str] = names_in(STUB)
"""The module that defines each name of ``alignment``."""
