"""Plug-ins: named objects that modules of a folder of ours and installed distributions offer, found without imports.

A distribution offers an object by an entry point, as in ``[project.entry-points."alignment.methods"]`` with
``kto = "my_package.kto:METHOD"``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
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
    type: str = "builtins:object"
    """What each must be an instance of, as ``module:Class``: its module may import this group."""

    def targets(self) -> dict[str, str]:
        """Where each plug-in is, as ``module:attribute`` by name, ours first. Nothing is imported but the package of ours."""
        return {name: targets[0] for name, targets in _targets(self).items()}

    def names(self) -> tuple[str, ...]:
        """The names that :meth:`load` takes."""
        return tuple(_targets(self))

    def module(self, name: str) -> str:
        """The module of a plug-in. Raises UserError."""
        return self._target(name).partition(":")[0]

    def load(self, name: str) -> Any:
        """The plug-in. Raises UserError if there is none of this name, or several, or if it does not load.

        ``a_b`` is ``a-b``.
        """
        return self._at(self._target(name), name)

    def _at(self, target: str, name: str) -> Any:
        try:
            return self._checked(resolve(target))
        except Exception as error:
            if self._is_ours(target):
                raise
            raise UserError(
                f"the {self.what} {name!r} ({target}, group {self.name}) does not load: {type(error).__name__}: {error}"
            ) from error

    def loaded(self) -> tuple[dict[str, Any], list[str]]:
        """All plug-ins that load, by name, and a sentence for each that does not: it is the trouble of those who use it.

        Ours stay where others bring one of the same name. What does not load is tried once.
        """
        found, problems = _loaded(self)
        return dict(found), list(problems)

    def _is_ours(self, target: str) -> bool:
        return target.startswith(f"{self.package}.")

    def _checked(self, found: Any) -> Any:
        """Raises TypeError for what those who go through all plug-ins would stumble over."""
        wanted = resolve(self.type)
        if not isinstance(found, wanted):
            raise TypeError(f"it is not a {wanted.__name__}")
        if missing := [name for name in inspect.get_annotations(wanted) if not hasattr(found, name)]:
            raise TypeError(f"every {wanted.__name__} needs {', '.join(f'`{name}`' for name in missing)}")
        return found

    def _target(self, name: str) -> str:
        known = _targets(self)
        if name.replace("_", "-") not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"there is no {self.what} {name!r}; choose one of {', '.join(known)}{hint}")
        target, *others = known[name.replace("_", "-")]
        if others:
            raise UserError(
                f"several installed packages provide the {self.what} {name!r}: {', '.join([target, *others])}; "
                "uninstall all but one"
            )
        return target


def resolve(target: str) -> Any:
    """What ``module:attribute`` names. Raises whatever the import of the module raises, and AttributeError."""
    module, _, attribute = target.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def entry_points(group: str) -> metadata.EntryPoints:
    """Those of a group, of all installed distributions."""
    return _every_group().select(group=group)


@functools.cache
def _every_group() -> Any:
    return metadata.entry_points()  # reads files of every distribution


@functools.cache
def _targets(group: Group) -> dict[str, list[str]]:
    """More than one under a name is nobody's trouble but theirs who ask for it."""
    spec = util.find_spec(group.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = {
        one.name.replace("_", "-"): [f"{group.package}.{one.name}:{group.attribute}"]
        for one in sorted(pkgutil.iter_modules(folders), key=lambda one: one.name)
        if not one.name.startswith("_")
    }
    for entry in sorted(entry_points(group.name)):
        target = entry.value if ":" in entry.value else f"{entry.value}:{group.attribute}"
        targets = found.setdefault(entry.name.replace("_", "-"), [])
        if target not in targets:
            targets.append(target)
    return found


@functools.cache
def _loaded(group: Group) -> tuple[dict[str, Any], list[str]]:
    found, problems = {}, []
    for name, (target, *others) in _targets(group).items():
        try:
            found[name] = group.load(name)
        except UserError as error:
            problems.append(str(error))
            if others and group._is_ours(target):
                found[name] = group._at(target, name)
    return found, problems
