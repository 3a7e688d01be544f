"""Plug-ins: named objects in the modules of one of our folders and in installed distributions, found without imports.

A distribution provides an object by an entry point, as in ``[project.entry-points."alignment.methods"]`` with
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
    """Name of the plug-in in each of these modules."""
    what: str
    """The word for a plug-in in messages, such as ``method``."""
    type: str = "builtins:object"
    """Class of the plug-ins, as ``module:Class``, because its module may import this group."""

    def targets(self) -> dict[str, str]:
        """The place of each plug-in, as ``module:attribute`` by name, ours first. Only our own package is imported."""
        return {name: targets[0] for name, targets in _targets(self).items()}

    def names(self) -> tuple[str, ...]:
        """The names that :meth:`load` accepts."""
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
        """All plug-ins that load, by name, and a sentence for each other one. Failures surface only when that plug-in is used.

        One of ours takes precedence over one of the same name. Loading is tried once per process.
        """
        plugins, problems = _loaded(self)
        return dict(plugins), list(problems)

    def _is_ours(self, target: str) -> bool:
        return target.startswith(f"{self.package}.")

    def _checked(self, plugin: Any) -> Any:
        """Raises TypeError for a plug-in of another class, or without one of its annotated attributes."""
        wanted = resolve(self.type)
        if not isinstance(plugin, wanted):
            raise TypeError(f"it is not a {wanted.__name__}")
        if missing := [name for name in inspect.get_annotations(wanted) if not hasattr(plugin, name)]:
            raise TypeError(f"every {wanted.__name__} needs {', '.join(f'`{name}`' for name in missing)}")
        return plugin

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
    """The object at ``module:attribute``. Raises as the import of the module does, and AttributeError."""
    module, _, attribute = target.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def entry_points(group: str) -> metadata.EntryPoints:
    """The entry points of a group in all installed distributions."""
    return _every_group().select(group=group)


@functools.cache
def _every_group() -> Any:
    return metadata.entry_points()  # reads files of every distribution


@functools.cache
def _targets(group: Group) -> dict[str, list[str]]:
    """Targets by name. Several targets of one name are an error only when that name is loaded."""
    spec = util.find_spec(group.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    by_name = {
        module.name.replace("_", "-"): [f"{group.package}.{module.name}:{group.attribute}"]
        for module in sorted(pkgutil.iter_modules(folders), key=lambda module: module.name)
        if not module.name.startswith("_")
    }
    for entry in sorted(entry_points(group.name)):
        target = entry.value if ":" in entry.value else f"{entry.value}:{group.attribute}"
        targets = by_name.setdefault(entry.name.replace("_", "-"), [])
        if target not in targets:
            targets.append(target)
    return by_name


@functools.cache
def _loaded(group: Group) -> tuple[dict[str, Any], list[str]]:
    plugins: dict[str, Any] = {}
    problems: list[str] = []
    for name, (target, *others) in _targets(group).items():
        try:
            plugins[name] = group.load(name)
        except UserError as error:
            problems.append(str(error))
            if others and group._is_ours(target):
                plugins[name] = group._at(target, name)
    return plugins, problems
