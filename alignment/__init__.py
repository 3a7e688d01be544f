"""What flows and plug-ins of one's own are written with: one import for all of it.

The stub ``__init__.pyi`` beside this file lists the names. Each is imported when it is first used, so importing this package is
cheap. docs/flows.md and docs/extending.md show both uses.
"""

from __future__ import annotations

import importlib
from typing import Any

from alignment_core.public import MODULE_OF

__all__ = tuple(MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF})
