"""Loading the user's code: the source that a stage's key counts, and no other.

Imports find the files that count, by name. In a process that serves a function of the user's, an audit hook of Python refuses
to execute any other file of the user's, whether it is imported or executed by its path.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
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


class Uncounted(ImportError):
    """The user's code loads a file of the user's that the key does not count."""


def serve(files: Mapping[str, str]) -> None:
    """From now on, load ``files`` only if they have these digests, and none of the user's that no loaded module counts."""
    EXPECTED.update(files)
    sys.addaudithook(_refuse_uncounted)


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
    """Executes the source itself, never cached bytecode, and only if it is what the key counts."""

    def get_code(self, fullname: str) -> Any:
        data = self.get_data(self.path)
        if EXPECTED and EXPECTED.get(self.path) != digest_of_source(data):
            raise UserError(
                f"{self.path} changed since this stage began, so its results would not match the stage's key"
            )
        return self.source_to_code(data, self.path)


def _refuse_uncounted(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook: raise Uncounted before a file of the user's is executed that does not count."""
    if event == "exec":
        executed = getattr(arguments[0], "co_filename", "")
        name = executed if executed.endswith(".py") else ""  # not a template, nor code that was made from a text
    else:
        name = arguments[1] if event == "import" else ""  # the file of an extension module, None for others
    if not name:
        return
    file = file_at(name) or file_at(f"{name}c")  # bytecode without its source
    if file is not None and file not in _counted.values() and _is_of_the_user(file):
        raise Uncounted(
            f"{file} is loaded in a way that the source does not show, so the stage's key does not count it: write `import` "
            "and the module's name, and put its folder on PYTHONPATH if it does not lie beside"
        )


def _is_of_the_user(file: Path) -> bool:
    """Whether a file lies below the folder of a file that counts, or where imports look, and does not belong to a tool."""
    caches = [Path(cache).expanduser().resolve() for name in CACHES if (cache := os.environ.get(name))]
    if installed(file) or ".cache" in file.parts or any(map(file.is_relative_to, (ROOT / PACKAGE, *caches))):
        return False
    folders = {counted.parent for counted in _counted.values() if not installed(counted)}
    folders |= {Path(entry).resolve() for entry in sys.path}
    return any(file.is_relative_to(folder) and not _is_of_a_tool(file, folder) for folder in folders)


def _is_of_a_tool(file: Path, folder: Path) -> bool:
    """Whether a file below ``folder`` is in a hidden folder, an environment of venv or conda, npm's folder or the folder for
    temporary files, or in a subfolder of it if ``folder`` is the latter."""
    between = file.parents[: len(file.parents) - len(folder.parents) - 1]
    temporary = Path(tempfile.gettempdir()).resolve()
    return any(
        temporary in (parent, folder)
        or parent.name.startswith(".")
        or parent.name == "node_modules"
        or (parent / "pyvenv.cfg").exists()
        or (parent / "conda-meta").exists()
        for parent in between
    )
