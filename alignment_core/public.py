"""The names of ``alignment``, the one import of users' flows and plug-ins, and the modules that define them.

The stub ``alignment/__init__.pyi`` is the list. It is read here, because stage keys need it too: a plug-in that imports a
name from ``alignment`` computes with the module that defines it. (``lazy-loader`` reads stubs as well, but only of names
that are defined below the package.)
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

FACADE = "alignment"
STUB = Path(__file__).parents[1] / FACADE / "__init__.pyi"
MODULE_OF: Mapping[str, str] = {
    alias.name: str(node.module)
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module that defines each name."""
