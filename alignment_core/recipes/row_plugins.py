"""Plug-ins that define parts of a recipe's data sections: kinds of rows (their formats) and origins of rows (their fields).

They are found by name. Their modules must not import the sections, which load the plug-ins while they are imported.
"""

from __future__ import annotations

from typing import Any

from alignment_core.plugins import Group

KINDS = Group("alignment.kinds", "alignment_core.data.kinds", "KIND", "kind of rows", "alignment_core.data.kinds:Kind")
ORIGINS = Group(
    "alignment.origins", "alignment_core.data.origins", "ORIGIN", "origin of rows", "alignment_core.data.origins:Origin"
)


def formats() -> tuple[str, ...]:
    """The formats that some kind of rows can be read from. A kind that does not load matters only to recipes that name it."""
    return tuple(dict.fromkeys(name for kind in KINDS.loaded()[0].values() for name in kind.formats))


def origins() -> dict[str, Any]:
    """The origins that load (:class:`alignment_core.data.origins.Origin`), by the field of a source that names their rows."""
    return {name.replace("-", "_"): origin for name, origin in ORIGINS.loaded()[0].items()}
