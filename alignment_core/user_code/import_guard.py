"""Loading the user's code: the source that a stage's key counts, and no other.

Imports find the files that count, by name. In a process that serves a function of the user's, a finder refuses any other
module that imports find, unless it is installed or lies in a library's cache, and an audit hook of Python refuses to execute
any other file of the user's by its path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment_core.errors import UserError
from alignment_core.source_code import PACKAGE, ROOT, digest_of_source
from alignment_core.user_code.dependencies import Code, code_of, file_at, installed

EXPECTED: dict[str, str] = {}
"""In a process that serves a user's function: the digests that its files must have. If this is empty, they may be any."""
CACHES = (
    *("HF_HOME", "HF_MODULES_CACHE", "TORCH_HOME", "XDG_CACHE_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
"""Variables that name folders where libraries put code that they downloaded or generated."""
_counted: dict[str, Path] = {}
"""The files that may be loaded here, by module name."""
_last = threading.local()
"""``opened``: the file that the thread opened last."""


class Uncounted(ImportError):
    """The user's code loads a file of the user's that the key does not count."""


def serve(files: Mapping[str, str]) -> None:
    """From now on, load ``files`` only if they have these digests, and none of the user's that no loaded module counts."""
    EXPECTED.update(files)
    sys.meta_path.insert(0, _Guard)  # the finder of the files that count comes before it
    # unlike a finder, which code may take out of sys.meta_path again, an audit hook stays for as long as the process
    sys.addaudithook(_refuse_executed)


def load(source: str) -> ModuleType:
    """Import ``file.py`` or ``package.module`` with all that it imports of the user's.

    Raises whatever loading raises, and UserError for a file that differs from :data:`EXPECTED`.
    """
    is_file = source.endswith(".py")
    if is_file or source.partition(".")[0] != PACKAGE:
        code = code_of(source)
        _count(code)
        if is_file:
            return _execute(code)
    return importlib.import_module(source)


def refusal(error: BaseException | None) -> Exception | None:
    """The refusal of this module that ``error`` is or follows from: the user's code may have wrapped it."""
    while error is not None and not isinstance(error, Uncounted | UserError):
        error = error.__cause__ or error.__context__
    return error


def _count(code: Code) -> None:
    """Have imports find the files that count. Raises UserError if one of them has the name of another loaded file."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if code.folder and str(code.folder) not in sys.path:
        sys.path.append(str(code.folder))  # so that an import finds, and the hook refuses, a file that does not count
    for name, path in code.files.items():
        is_import = name != code.name or code.folder is None
        if (other := _counted.setdefault(name if is_import else str(path), path)) != path:
            raise UserError(
                f"{code.source} imports {path} where another file of this stage imports {other}: rename one"
            )


def _execute(code: Code) -> ModuleType:
    spec = _spec(code.name, code.files[code.name])
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[code.name] = module  # data classes and pickles look for it there
    spec.loader.exec_module(module)
    return module


class _Finder:
    """Finds the modules that count."""

    of_user_code = True

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """As importlib's finders."""
        file = _counted.get(name)
        if file is None or zipfile.is_zipfile(file):  # imports find a module in an archive themselves
            return None
        return _spec(name, file)


def _spec(name: str, file: Path) -> ModuleSpec:
    loader = _Loader(name, str(file)) if file.suffix == ".py" else None
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
    assert spec is not None
    return spec


class _Loader(SourceFileLoader):
    """Executes the source itself, never cached bytecode, and only if the key counts it."""

    def get_code(self, fullname: str) -> Any:
        data = self.get_data(self.path)
        if EXPECTED and EXPECTED.get(self.path) != digest_of_source(data):
            raise UserError(
                f"{self.path} changed since this stage began, so its results would not match the stage's key"
            )
        return self.source_to_code(data, self.path)


class _Guard:
    """Finds the modules that the finders after it find, and refuses to load the user's modules that do not count."""

    of_user_code = True

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """As importlib's finders."""
        finders = sys.meta_path[sys.meta_path.index(_Guard) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is None or not spec.has_location or not spec.origin:
            return spec
        uncounted = _uncounted(spec.origin, is_found=True)
        return spec if uncounted is None else ModuleSpec(name, _Refusing(uncounted), origin=spec.origin)


class _Refusing(importlib.abc.InspectLoader):
    """Raises Uncounted only when the module is loaded, so that code may still look for it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise _refusal_of(self._file)

    def get_source(self, fullname: str) -> str | None:  # get_code calls it: for scripts that are named as modules
        raise _refusal_of(self._file)


def _refuse_executed(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook: raise Uncounted before a file of the user's is executed that does not count."""
    path: Any = None
    if event == "open":
        _last.opened = arguments[0]
    elif event in ("marshal.loads", "marshal.load"):  # bytecode may say that it comes from another file, or from none
        path = _source_of_bytecode(getattr(_last, "opened", None))
    elif event == "exec":
        executed = getattr(arguments[0], "co_filename", "")
        path = executed if executed.endswith(".py") else None  # not a template, nor code that was made from a text
    elif event == "import":
        path = arguments[1]  # the file of an extension module, None for others
    if path and (file := _uncounted(path)) is not None:
        raise _refusal_of(file)


def _source_of_bytecode(opened: Any) -> str | None:
    """The source of a file of bytecode, or the file itself if it has no source; None for any other file."""
    path = os.fsdecode(opened) if isinstance(opened, str | bytes | os.PathLike) else ""
    if not path.endswith(".pyc"):
        return None
    try:
        source = importlib.util.source_from_cache(path)
    except ValueError:  # not in a folder for compiled files
        source = path[:-1]
    return source if os.path.isfile(source) else path


def _refusal_of(file: Path) -> Uncounted:
    return Uncounted(
        f"{file} is loaded in a way that the source does not show, so the stage's key does not count it: write `import` and "
        "the module's name, and put its folder on PYTHONPATH if it does not lie beside"
    )


def _uncounted(path: str, is_found: bool = False) -> Path | None:
    """The file at ``path``, or the archive that ``path`` leads into, if it is the user's and does not count.

    A file that imports found (``is_found``) is the user's wherever it lies, unless it belongs to a library. Any other must also
    lie below the folder of a file that counts, or where imports look, and not belong to a tool; or be reached by a link there.
    """
    named = Path(os.path.abspath(path))
    if not _counted or _is_of_a_library(named):  # before the user's code is loaded, only ours imports: plug-ins, too
        return None
    file = file_at(path)
    if file is None or file in _counted.values() or _is_of_a_library(file):
        return None
    if is_found or _is_of_the_user(named) or _is_of_the_user(file):
        return next((level for level in (named, *named.parents) if level.is_file()), file)
    return None


def _is_of_a_library(file: Path) -> bool:
    """Whether a file is installed, in a cache, or ours."""
    if installed(file) or ".cache" in file.parts:
        return True
    caches = [Path(cache).expanduser().resolve() for name in CACHES if (cache := os.environ.get(name))]
    return any(map(file.is_relative_to, (ROOT / PACKAGE, *caches)))


def _is_of_the_user(file: Path) -> bool:
    """Whether a file lies below the folder of a file that counts, or where imports look, and does not belong to a tool."""
    folders = {counted.parent for counted in _counted.values() if not installed(counted)}
    folders |= {folder for entry in sys.path for folder in _forms(entry)}
    return any(file.is_relative_to(folder) and not _is_of_a_tool(file, folder) for folder in folders)


def _is_of_a_tool(file: Path, folder: Path) -> bool:
    """Whether a file below ``folder`` is in a hidden folder, an environment of venv or conda, npm's folder or the folder for
    temporary files, or in a subfolder of it if ``folder`` is the latter."""
    levels = len(file.parents) - len(folder.parents) - 1
    between = file.parents[: max(levels, 0)]  # none for an archive that is itself on the path
    temporary = _forms(tempfile.gettempdir())
    return any(
        not temporary.isdisjoint((parent, folder))
        or parent.name.startswith(".")
        or parent.name == "node_modules"
        or (parent / "pyvenv.cfg").exists()
        or (parent / "conda-meta").exists()
        for parent in between
    )


def _forms(folder: str) -> set[Path]:
    """A folder as it is named, and without links."""
    return {Path(os.path.abspath(folder)), Path(folder).resolve()}
