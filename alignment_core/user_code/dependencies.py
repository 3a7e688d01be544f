"""The user's Python: what of it a stage's key counts.

What counts is the file that the recipe names and all that it can reach by imports, from beside it or from ``sys.path``, but
for what is installed (site-packages, the standard library). It is found without executing any of it. Files that it reads
while it runs do not count. That nothing else is loaded is the business of :mod:`~alignment_core.user_code.import_guard`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.source_code import PACKAGE, Source, computing_source, digest_of_source, reachable, read, spec_of

COUNTED: ContextVar[dict[str, str]] = ContextVar("files that a key counts")
"""The files that keys counted in this context, with the digests of their source: see :func:`counting`."""


@contextmanager
def counting() -> Iterator[dict[str, str]]:
    """Collects which files the keys that are computed in this context count, by path, with the digests of their source."""
    with serving({}) as files:
        yield files


@contextmanager
def serving(files: dict[str, str]) -> Iterator[dict[str, str]]:
    """A process that serves one of the functions of these files, if it is made in this context, loads these and no others."""
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
    """A file of the user's, and what it imports."""

    source: str
    """``file.py`` or a module's name, as the recipe has it."""
    name: str
    """Name of the module once it is loaded; that of a file is none that an import could ask for."""
    folder: Path | None
    """Where imports look first: beside a file."""
    files: dict[str, Path] = field(default_factory=dict)
    """The user's files that count, by module name."""
    ours: dict[str, str] = field(default_factory=dict)
    """Digests of our own package's modules among what it imports, by name."""

    def find(self, name: str) -> Path | None:
        """The file of a module, if it is one that counts. Of installed packages that is the one that the recipe names."""
        beside = _file(name, [str(self.folder)]) if self.folder else None
        path = beside or locate(name)
        named = not self.folder and name.partition(".")[0] == self.name.partition(".")[0]
        return path if path and (beside or named or not installed(path)) else None

    def digest(self, docstrings: bool) -> str:
        """Of all that counts; the same wherever the files lie, and whatever the one that the recipe names is called."""
        counted, found = COUNTED.get({}), dict(self.ours)
        for name, path in self.files.items():
            data = path.read_bytes()
            counted[str(path)] = digest_of_source(data, docstrings=True)
            found["" if name == self.name else name] = digest_of_source(data, docstrings)
        return digest_of(found)


def code_of(source: str) -> Code:
    """What counts of ``file.py`` or ``package.module``, none of which is executed.

    Raises OSError, SyntaxError, ValueError and ImportError.
    """
    importlib.invalidate_caches()  # files may have been written within the last tick of the clock
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            begins = "relative paths are relative to the recipe's file, those of --set to the working folder"
            raise FileNotFoundError(f"no file {source} ({begins})")
        code, module = Code(source, f"{path.stem} (file)", path.parent), ""
    else:
        path = _source_file(source)
        code, module = Code(source, source, None), source

    def source_of(name: str) -> tuple[Path, Source] | None:
        if name.partition(".")[0] == PACKAGE:
            return computing_source(name)
        if name == code.name:
            return path, _read_named(path, module)
        found = code.find(name)
        return None if found is None else (found, _read(found, name))

    for name, (found, parsed) in reachable(code.name, source_of).items():
        if name.partition(".")[0] == PACKAGE:
            code.ours[name] = parsed.digest
        else:
            code.files[name] = found
    return code


def _read_named(path: Path, module: str) -> Source:
    """The source of the file that the recipe names."""
    try:
        return read(path.read_bytes(), module, path)
    except SyntaxError as error:
        error.filename = path.name
        raise


def _read(path: Path, module: str) -> Source:
    """The source of a module that is imported, perhaps; one that is no Python, or broken, counts by its bytes."""
    data = path.read_bytes()
    try:
        return read(data, module, path)
    except (SyntaxError, ValueError):
        return Source(digest_of_source(data), ())


def _source_file(name: str) -> Path:
    """The source file of a module. Raises ImportError if there is none."""
    spec = spec_of(name)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {name!r}")
    if not spec.origin or not spec.origin.endswith(".py"):
        raise ImportError(f"the module {name} has no Python source")
    return Path(spec.origin).resolve()


def locate(name: str) -> Path | None:
    """The file of a module as imports find it, wherever that is; None for one without a file."""
    return _file(name, None)


def _file(name: str, search_path: Sequence[str] | None) -> Path | None:
    return file_of(spec_of(name, search_path))


def file_of(spec: Any) -> Path | None:
    """The file of a module, which is the archive if it lies in one; None for one without a file."""
    if not isinstance(spec, ModuleSpec) or not spec.has_location or not spec.origin:
        return None
    path = Path(spec.origin).resolve()
    return next((one for one in (path, *path.parents) if one.is_file()), None)


def installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _installations(tuple(sys.path)))


@functools.lru_cache(maxsize=8)
def _installations(entries: tuple[str, ...]) -> list[Path]:
    """The standard library, and folders on the path that were filled by ``pip install --target``."""
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    folders = [Path(entry).resolve() for entry in entries if entry]
    return [*standard, *(folder for folder in folders if next(folder.glob("*.dist-info"), None))]
