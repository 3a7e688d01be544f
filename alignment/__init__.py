"""What flows and plug-ins of one's own are written with: one import for all of it.

The stub ``__init__.pyi`` beside this file lists the names. Each is imported when it is first used, so importing this package is
cheap. docs/flows.md and docs/extending.md show both uses.
"""

from __future__ import annotations

from alignment_core.public import MODULE_OF, lazy

__all__ = tuple(MODULE_OF)
__getattr__ = lazy(__name__, MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF})
