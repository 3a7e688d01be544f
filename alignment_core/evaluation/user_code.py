"""The user's Python: what of it a stage's key counts, and that what is loaded is what was counted.

What counts is the file that the recipe names and all that it imports from beside it. What it reads or loads by a path while
it runs does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.errors import UserError
from alignment_core.source_code import PACKAGE, Source, digest_of_source, find, package_source, reachable, read

COUNTED: ContextVar[dict[str, str]] = ContextVar("files that a key counts")
"""The files that keys counted in this context, with the digests of their source: see :func:`counting`."""
EXPECTED: dict[str, str] = {}
"""In a process that serves a user's function: the digests that its files must have; a file that is not here may have any."""
_serves = False
_LOADING = threading.RLock()
"""Loading changes what imports find, for all threads."""


@contextmanager
def counting() -> Iterator[dict[str, str]]:
    """Collects which files the keys that are computed in this context count, by path, with the digests of their source.

    A process that serves one of their functions, if it is made in this context, loads these and no others.
    """
    files: dict[str, str] = {}
    token = COUNTED.set(files)
    try:
        yield files
    finally:
        COUNTED.reset(token)


def edited(files: Mapping[str, str]) -> Iterator[str]:
    """Those of the files that :func:`counting` collected that are other ones by now, or gone."""
    for path, digest in files.items():
        try:
            same = digest_of_source(Path(path).read_bytes(), docstrings=True) == digest
        except OSError:
            same = False
        if not same:
            yield path


@dataclass(frozen=True)
class Code:
    """A file of the user's, and what it imports from beside it."""

    place: str
    """``file.py`` or a module's name, as the recipe has it."""
    name: str
    """Name of the module once it is loaded; that of a file is none that an import could ask for."""
    folder: Path
    """What lies in it is beside."""
    files: dict[str, Path] = field(default_factory=dict)
    """The user's files that count, by module name."""
    ours: dict[str, str] = field(default_factory=dict)
    """Digests of our own package's modules among what it imports, by name."""

    @property
    def installed(self) -> bool:
        """Whether it is a package of site-packages, where nothing else is beside it."""
        return self.folder.name in ("site-packages", "dist-packages")

    def beside(self, name: str) -> Path | None:
        """The source file of a module, if it is beside."""
        if self.installed and name.partition(".")[0] != self.name.partition(".")[0]:
            return None
        return find(self.folder, name) or self._of_its_package(name)

    def _of_its_package(self, name: str) -> Path | None:
        """The same where a module is named by its package, and imports find this where the file lies."""
        top = name.partition(".")[0]
        for folder in (self.folder, *self.folder.parents):
            if folder.name == top and (spec := PathFinder.find_spec(top)) is not None:
                places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
                return find(folder.parent, name) if folder in places else None
        return None

    def digest(self, docstrings: bool) -> str:
        """Of all that counts; the same wherever the files lie, and whatever the one that the recipe names is called."""
        counted, found = COUNTED.get({}), dict(self.ours)
        for name, path in self.files.items():
            data = path.read_bytes()
            counted[str(path)] = digest_of_source(data, docstrings=True)
            found["" if name == self.name else name] = digest_of_source(data, docstrings)
        return digest_of(found)


def code_of(place: str) -> Code:
    """What counts of ``file.py`` or ``package.module``. Raises OSError, SyntaxError, ValueError and ImportError."""
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            begins = "relative paths begin at the recipe's file, those of --set at the working folder"
            raise FileNotFoundError(f"no file {place} ({begins})")
        code, module = Code(place, f"{path.stem} (file)", path.parent), ""
    else:
        path, folder = _module_file(place)
        code, module = Code(place, place, folder), place

    def source_of(name: str) -> tuple[Path, Source] | None:
        if name.partition(".")[0] == PACKAGE:
            return package_source(name)
        if name == code.name:
            return path, read(path.read_bytes(), module, path)
        found = code.beside(name)
        return None if found is None else (found, read(found.read_bytes(), name, found))

    for name, (found, source) in reachable(code.name, source_of).items():
        if name.partition(".")[0] == PACKAGE:
            code.ours[name] = source.digest
        else:
            code.files[name] = found
    return code


def _module_file(name: str) -> tuple[Path, Path]:
    """The source file of a module, and the folder that imports find its package in."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ImportError(f"the module {name} has no Python source" if spec else f"no module named {name!r}")
    path = Path(spec.origin).resolve()
    return path, path.parents[name.count(".") + (path.name == "__init__.py")]


def serve(files: Mapping[str, str]) -> None:
    """Make this process one that serves a user's code: it loads ``files`` only if they have these digests, modules as they
    are on the disk, too, and imports inside of functions find what lies beside."""
    global _serves
    _serves = True
    EXPECTED.update(files)


def load(place: str) -> ModuleType:
    """Import ``file.py`` or ``package.module``, a file as it is on the disk now, with what it imports from beside it.

    Raises whatever loading raises, and UserError for a file that is not what :data:`EXPECTED` says.
    """
    is_file = place.endswith(".py")
    code = code_of(place) if is_file else _code_of_module(place) if _serves else None
    if code is None:
        return importlib.import_module(place)
    with _LOADING:
        finder = _Finder(code)
        before = {} if _serves else {name: sys.modules.pop(name) for name in finder.names & sys.modules.keys()}
        sys.meta_path.insert(0, finder)
        try:
            return _execute(code) if is_file else importlib.import_module(place)
        finally:
            if not _serves:
                sys.meta_path.remove(finder)
                for name in finder.names & sys.modules.keys():
                    del sys.modules[name]
                sys.modules.update(before)


def _code_of_module(name: str) -> Code | None:
    """None for our own modules, and for what has no Python source or cannot be found: importing it says what is wrong."""
    if name.partition(".")[0] == PACKAGE:
        return None
    try:
        return code_of(name)
    except (ImportError, ValueError, TypeError):
        return None


def _execute(code: Code) -> ModuleType:
    path = str(code.files[code.name])
    spec = importlib.util.spec_from_file_location(code.name, path, loader=_Loader(code.name, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[code.name] = module  # data classes and pickles look for it there
    spec.loader.exec_module(module)
    return module


class _Loader(SourceFileLoader):
    """Executes the source itself, never what was compiled of it earlier, and only if it is what was counted."""

    def get_code(self, fullname: str) -> Any:
        data = self.get_data(self.path)
        expected = EXPECTED.get(self.path)
        if expected is not None and digest_of_source(data, docstrings=True) != expected:
            raise UserError(
                f"{self.path} changed since this stage began, so what it would give is not what the key says"
            )
        return self.source_to_code(data, self.path)


class _Finder:
    """Finds the modules that lie beside a user's file, and that its imports name."""

    def __init__(self, code: Code) -> None:
        self._code = code
        is_file = code.place.endswith(".py")
        self._files = {name: path for name, path in code.files.items() if not (is_file and name == code.name)}
        packages = {name.rpartition(".")[0] for name in self._files if "." in name}
        self.names = self._files.keys() | packages

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """As importlib's finders."""
        if name in self._files:
            file = self._files[name]
            parts = [str(file.parent)] if file.name == "__init__.py" else None
            loader = _Loader(name, str(file))
            return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=parts)
        folder = self._code.folder.joinpath(*name.split("."))
        if name in self.names and folder.is_dir():  # a package without __init__.py
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        beside = None if self._code.installed else self._code.beside(name)
        if beside is not None and name.partition(".")[0] in self.names:
            raise ImportError(f"{beside} is imported in a way that cannot be seen in the source; write `import {name}`")
        return None
