"""The user's Python: the files that a stage's key counts.

These are the file that the recipe names and all files that it reaches by imports, beside it or on ``sys.path``, except
installed ones (site-packages, the standard library). They are found without executing any of them. Files that the code reads
while it runs do not count. :mod:`~alignment_core.user_code.import_guard` refuses to load others.
"""

from __future__ import annotations

import functools
import importlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of
from alignment_core.source_code import PACKAGE, Source, computing_source, digest_of_source, reachable, read, spec_of

COUNTED: ContextVar[dict[str, str]] = ContextVar("files that a key counts")
"""Digests, by path, of the files that keys counted in this context: see :func:`counting`."""


@contextmanager
def counting(files: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Adds the files that keys count in this context to ``files``, by path, with the digests of their source.

    A process that is created in this context for a function of the user's loads these files and no others.
    """
    files = {} if files is None else files
    token = COUNTED.set(files)
    try:
        yield files
    finally:
        COUNTED.reset(token)


def edited(files: Mapping[str, str]) -> Iterator[str]:
    """The files that differ from the digests that :func:`counting` collected, or are gone."""
    for path, digest in files.items():
        try:
            is_same = digest_of_source(Path(path).read_bytes()) == digest
        except OSError:
            is_same = False
        if not is_same:
            yield path


@dataclass(frozen=True)
class Code:
    """A file of the user's, and its imports."""

    source: str
    """``file.py`` or a module's name, as the recipe has it."""
    name: str
    """Name of the module once it is loaded; for a file, a name that no import can have."""
    folder: Path | None
    """The folder where imports look first: that of the file."""
    files: dict[str, Path] = field(default_factory=dict)
    """The user's files that count, by module name."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of these files, and of our package's modules among the imports, by module name."""

    def find(self, name: str) -> Path | None:
        """The file of a module, if it counts. Of the installed packages, only the one that the recipe names does."""
        beside = file_of(spec_of(name, [str(self.folder)])) if self.folder else None
        path = beside or locate(name)
        is_named = not self.folder and name.partition(".")[0] == self.name.partition(".")[0]
        return path if path and (beside or is_named or not installed(path)) else None

    def count(self, name: str, path: Path, digest: str) -> None:
        """Make a file count."""
        self.files[name] = path
        self.digests[name] = digest

    def digest(self) -> str:
        """Of all that counts; independent of where the files lie, and of the name of the one that the recipe names."""
        COUNTED.get({}).update({str(path): self.digests[name] for name, path in self.files.items()})
        return digest_of({"" if name == self.name else name: digest for name, digest in self.digests.items()})


def code_of(source: str) -> Code:
    """The files that count for ``file.py`` or ``package.module``; none of them is executed.

    Raises OSError, SyntaxError, ValueError and ImportError.
    """
    importlib.invalidate_caches()  # files may have been written within the last tick of the clock
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            base = "relative paths are relative to the recipe's file, those of --set to the working folder"
            raise FileNotFoundError(f"no file {source} ({base})")
        code = Code(source, f"{path.stem} (file)", path.parent)
    else:
        path = _source_file(source)
        code = Code(source, source, None)

    def source_of(name: str) -> tuple[Path, Source] | None:
        if name.partition(".")[0] == PACKAGE:
            return computing_source(name)
        file = path if name == code.name else code.find(name)
        return None if file is None else (file, _read(file, name, is_named=name == code.name))

    for name, (file, parsed) in reachable(code.name, source_of).items():
        if name.partition(".")[0] == PACKAGE:
            code.digests[name] = parsed.digest
        else:
            code.count(name, file, parsed.digest)
    return code


def _read(path: Path, name: str, is_named: bool) -> Source:
    """The source of a module. One that is not Python, or broken, counts by its bytes, unless the recipe names it."""
    data = path.read_bytes()
    try:
        return read(data, name, path)
    except (SyntaxError, ValueError) as error:
        if not is_named:
            return Source(digest_of_source(data), ())
        if isinstance(error, SyntaxError):
            error.filename = path.name
        raise


def _source_file(name: str) -> Path:
    """The source file of a module. Raises ImportError if there is none."""
    spec = spec_of(name) if all(part.isidentifier() for part in name.split(".")) else None
    if spec is None:
        raise ModuleNotFoundError(f"no module named {name!r}")
    if not spec.origin or not spec.origin.endswith(".py"):
        raise ImportError(f"the module {name} has no Python source; name a function written in Python")
    return Path(spec.origin).resolve()


def locate(name: str) -> Path | None:
    """The file of a module as imports find it, installed or not; None for one without a file."""
    return file_of(spec_of(name))


def file_of(spec: Any) -> Path | None:
    """The file of a module, or the archive that has it; None for one without a file."""
    has_file = isinstance(spec, ModuleSpec) and spec.has_location and spec.origin
    return file_at(spec.origin) if has_file else None


def file_at(path: str) -> Path | None:
    """The file at a path, or the archive that the path leads into."""
    resolved = Path(path).resolve()
    return next((file for file in (resolved, *resolved.parents) if file.is_file()), None)


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
