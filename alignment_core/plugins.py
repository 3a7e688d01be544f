"""Plug-ins: what the modules of a folder of ours, and installed distributions, offer under names. Found without importing them.

A distribution offers an object by an entry point, as in ``[project.entry-points."alignment.methods"]`` with
``kto = "my_package.kto:METHOD"``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from alignment_core.errors import UserError


@dataclass(frozen=True)
class Group:
    """All plug-ins of one kind."""

    name: str
    """Group of entry points, such as ``alignment.methods``."""
    package: str
    """Package whose modules are the plug-ins that come with the project; ``a_b`` is called ``a-b``."""
    attribute: str
    """What each of these modules calls its plug-in."""
    what: str
    """What one is called in messages, such as ``method``."""

    def places(self) -> dict[str, str]:
        """Where each plug-in is, as ``module:attribute`` by name, ours first. Nothing is imported but the package of ours.

        Raises UserError if two go by the same name.
        """
        return dict(_places(self))

    def names(self) -> tuple[str, ...]:
        """The names that :meth:`load` takes."""
        return tuple(self.places())

    def module(self, name: str) -> str:
        """The module of a plug-in. Raises UserError."""
        return self._place(name).partition(":")[0]

    def load(self, name: str) -> Any:
        """The plug-in. Raises UserError if there is none of this name, or if it does not load."""
        module, _, attribute = self._place(name).partition(":")
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except Exception as error:
            if module.startswith(f"{self.package}."):
                raise
            raise UserError(
                f"the {self.what} {name!r} ({module}:{attribute}, group {self.name}) does not load: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _place(self, name: str) -> str:
        places = _places(self)
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"there is no {self.what} {name!r}; choose one of {', '.join(places)}{hint}")
        return places[name]


@functools.cache
def _places(group: Group) -> dict[str, str]:
    spec = util.find_spec(group.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = {
        one.name.replace("_", "-"): f"{group.package}.{one.name}:{group.attribute}"
        for one in sorted(pkgutil.iter_modules(folders), key=lambda one: one.name)
        if not one.name.startswith("_")
    }
    for entry in sorted(metadata.entry_points(group=group.name)):
        place = entry.value if ":" in entry.value else f"{entry.value}:{group.attribute}"
        other = found.setdefault(entry.name, place)
        if other != place:
            raise UserError(
                f"two installed packages bring a {group.what} {entry.name!r}, {other} and {place}: uninstall one of them"
            )
    return found
