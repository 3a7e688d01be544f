"""The user's Python, loaded: the source that a stage's key counts, and no other."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment_core.errors import UserError
from alignment_core.source_code import PACKAGE, ROOT, digest_of_source
from alignment_core.user_code.dependencies import Code, code_of, file_of, installed, spec_of

EXPECTED: dict[str, str] = {}
"""In a process that serves a user's function: the digests that its files must have. If this is empty, they may be any."""
CACHES = (
    *("HF_HOME", "HF_MODULES_CACHE", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
"""Variables that name folders where libraries put code that they downloaded or generated."""
_serves: Finder | None = None
_LOADING = threading.RLock()
"""Loading changes what imports find, for all threads."""


class Uncounted(ImportError):
    """An import of the user's code that the key does not count."""


def serve(files: Mapping[str, str]) -> None:
    """Make this process one that serves a user's code: it loads ``files`` only if they have these digests, modules as they
    are on the disk, too, and imports inside of functions find what lies beside."""
    global _serves
    _serves = Finder()
    sys.meta_path.insert(0, _serves)
    EXPECTED.update(files)


def load(source: str) -> ModuleType:
    """Import ``file.py`` or ``package.module``, as it is on the disk now, with what it imports of the user's.

    Raises whatever loading raises, and UserError for a file that is not what :data:`EXPECTED` says.
    """
    is_file = source.endswith(".py")
    code = code_of(source) if is_file else _code_of_module(source)
    if code is None:
        return importlib.import_module(source)
    with _LOADING:
        if _serves is not None:
            _serves.add(code)
            return _execute(code) if is_file else importlib.import_module(source)
        finder = Finder()
        finder.add(code)
        before = {name: sys.modules.pop(name) for name in finder.names & sys.modules.keys()}
        sys.meta_path.insert(0, finder)
        try:
            return _execute(code) if is_file else importlib.import_module(source)
        finally:
            sys.meta_path.remove(finder)
            for name in finder.names & sys.modules.keys():
                del sys.modules[name]
            sys.modules.update(before)


def check_modules() -> None:
    """Raise UserError if the user's code got a module of the user's past the finder, as by its path."""
    if _serves is not None:
        _serves.check_modules()


def refusal(error: BaseException | None) -> Exception | None:
    """What was raised here, if it is ``error`` or led to it: the user's code may have wrapped it."""
    while error is not None and not isinstance(error, Uncounted | UserError):
        error = error.__cause__ or error.__context__
    return error


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
        if EXPECTED and EXPECTED.get(self.path) != digest_of_source(data, docstrings=True):
            raise UserError(
                f"{self.path} changed since this stage began, so its results would not match the stage's key"
            )
        return self.source_to_code(data, self.path)


class Finder:
    """Finds the modules that count, and refuses others of the user's."""

    of_user_code = True

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._named = set[Path]()
        self._folders = list[Path]()
        self._known, self._looked_at = set(sys.modules), 0
        self._problem = ""
        self.names: set[str] = set()
        """Modules that are found here."""

    def add(self, code: Code) -> None:
        """Find what counts of this, too. Raises UserError for a module that is another one for a file that was loaded."""
        is_file = code.folder is not None
        self._named.add(code.files[code.name])
        if code.folder and code.folder not in self._folders:
            self._folders.append(code.folder)
        for name, path in code.files.items():
            if is_file and name == code.name:
                continue
            if zipfile.is_zipfile(path):
                self._named.add(path)  # imports find its modules themselves
                continue
            if (other := self._files.setdefault(name, path)) != path:
                raise UserError(
                    f"{code.source} imports {path} where another file of this stage imports {other}: rename one"
                )
            self.names |= {name, *filter(None, [name.rpartition(".")[0]])}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """As importlib's finders."""
        if name in self._files:
            file = self._files[name]
            parts = [str(file.parent)] if file.name == "__init__.py" else None
            loader = _Loader(name, str(file)) if file.suffix == ".py" else None
            return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=parts)
        if name in self.names:  # a package without __init__.py
            folders = [one for folder in self._folders if (one := folder.joinpath(*name.split("."))).is_dir()]
            if folders:
                spec = ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = [str(one) for one in folders]
                return spec
        self._refuse(name, path)
        return None

    def _refuse(self, name: str, path: Sequence[str] | None) -> None:
        """Raise Uncounted if imports would find a file of the user's, or nothing where one lies beside."""
        if not self._named or name.partition(".")[0] == PACKAGE or (path and all(installed(Path(one)) for one in path)):
            return
        found = PathFinder.find_spec(name, path)
        if found is None and path is None:
            found = next(filter(None, (spec_of(name, [str(folder)]) for folder in self._folders)), None)
        file = file_of(found)
        if file is not None and file not in self._named and _of_the_user(file):
            raise Uncounted(
                f"{file} is imported in a way that is not visible in the source; write `import {name}`, and if the code itself "
                "adds the folder to sys.path, put that on PYTHONPATH instead"
            )

    def check_modules(self) -> None:
        """Raise UserError for a module that lies beside a file of the user's and was loaded by its path."""
        if len(sys.modules) != self._looked_at and self._named:
            self._looked_at = len(sys.modules)
            counted = {*self._files.values(), *self._named}
            folders = {*self._folders, *(file.parent for file in counted if not installed(file))}
            for name, module in list(sys.modules.items()):  # at once: other threads may import
                if name in self._known:
                    continue
                file = file_of(getattr(module, "__spec__", None))
                if file in counted or file is None or not any(_belongs(file, folder) for folder in folders):
                    self._known.add(name)
                else:
                    self._problem = (
                        f"{file} was loaded by its path, so the key does not count it; import it by its name"
                    )
        if self._problem:
            raise UserError(self._problem)


def _of_the_user(file: Path) -> bool:
    """Whether a file is neither ours nor installed, nor in a cache where libraries put what they downloaded."""
    if ".cache" in file.parts or installed(file):
        return False
    return not any(file.is_relative_to(one) for one in (ROOT / PACKAGE, *_caches()))


def _belongs(file: Path, folder: Path) -> bool:
    """Whether a file lies below the user's ``folder`` as a part of it, and not where tools put what is theirs."""
    if not file.is_relative_to(folder) or installed(file) or file.is_relative_to(ROOT / PACKAGE):
        return False
    between = file.parents[: len(file.parents) - len(folder.parents) - 1]
    temporary = Path(tempfile.gettempdir()).resolve()
    theirs = {*_caches(), temporary, *(between if folder == temporary else ())}
    return not any(one in theirs or _is_of_a_tool(one) for one in between)


def _is_of_a_tool(folder: Path) -> bool:
    """Whether this is a hidden folder, an environment that venv or conda made, or what npm installed."""
    named = folder.name.startswith(".") or folder.name == "node_modules"
    return named or (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def _caches() -> list[Path]:
    return [Path(folder).expanduser().resolve() for name in CACHES if (folder := os.environ.get(name))]
