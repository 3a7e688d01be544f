"""YAML files of lm-eval's tasks: what a file defines, and a digest of everything that decides what it measures."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alignment_core.canonical import digest_of, digest_of_file
from alignment_core.errors import UserError
from alignment_core.user_code.dependencies import code_of, installed, locate
from alignment_core.user_code.errors import raised


@dataclass(frozen=True)
class TaskFile:
    """A YAML file that defines a task or a group of tasks, by the rules of lm-eval 0.4.13."""

    name: str
    """The name of the task or group."""
    is_group: bool
    digest: str
    """SHA-256 over the file and the files that it names: those in `include`, the user's modules of `!function`, with their
    imports, and local `data_files`."""


def read_task(path: Path) -> TaskFile:
    """Read a file, without executing any function that it names. Raises UserError if it defines no task of lm-eval."""
    digests: dict[str, str] = {}
    config = _read(path, digests)
    is_group = "group" in config and "class" not in config
    name = config.get("group" if is_group else "task")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{path}: names no `task` of lm-eval")
    if is_group and not isinstance(config.get("task"), list):
        raise UserError(
            f"{path}: a `group` of lm-eval lists its tasks in `task`; write `tag: {name}` to mark a single task"
        )
    digests |= {str(file): digest_of_file(file) for file in _data_files(config)}
    return TaskFile(name, is_group, digest_of(list(digests.values())))


def _read(path: Path, digests: dict[str, str]) -> dict[str, Any]:
    """The configuration in a file and the files that it includes. ``digests`` gets those of all, and of their functions."""
    path = path.expanduser().resolve()
    if str(path) in digests:
        raise UserError(f"{path}: is included twice, which lm-eval refuses as a cycle")
    functions: list[str] = []

    class Loader(yaml.SafeLoader):
        """YAML with lm-eval's tag for functions, whose values are not needed here."""

    def note_function(loader: Loader, node: yaml.ScalarNode) -> None:
        functions.append(loader.construct_scalar(node))

    Loader.add_constructor("!function", note_function)
    try:
        data = path.read_bytes()
        content = yaml.load(data, Loader)
    except (yaml.YAMLError, OSError) as error:
        raise UserError(f"{path}: is not readable YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not a mapping of fields to values")
    digests[str(path)] = hashlib.sha256(data).hexdigest()
    for function in functions:
        module = function.rpartition(".")[0]
        try:
            digests |= _module_digest(module, path.parent)
        except (OSError, SyntaxError, ValueError, ImportError) as error:
            raise UserError(f"{path}: the module of {function} cannot be read: {raised(error)}") from None
    includes = content.pop("include", [])
    config: dict[str, Any] = {}
    for included in includes if isinstance(includes, list) else [includes]:
        config |= _read(path.parent / str(included), digests)
    return config | content


def _module_digest(name: str, folder: Path) -> dict[str, str]:
    """The digest of a module in this folder, or of the user's on ``sys.path``, with its imports; nothing if it is installed."""
    beside = folder / f"{name.replace('.', '/')}.py"
    if beside.is_file():
        return {str(beside): code_of(str(beside)).digest()}
    path = locate(name) if all(part.isidentifier() for part in name.split(".")) else None
    return {} if path is None or installed(path) else {str(path): code_of(name).digest()}


def _data_files(value: Any) -> Iterator[Path]:
    """Local files that the data sets of a configuration consist of, also those of tasks within a group."""
    if isinstance(value, list):
        for item in value:
            yield from _data_files(item)
    elif isinstance(value, dict):
        folder = Path(str(value.get("data_dir") or "")).expanduser()
        for pattern in _texts(value.get("data_files")):
            matches = glob.glob(str(folder / pattern), recursive=True)
            yield from (Path(match) for match in sorted(matches) if Path(match).is_file())
        for item in value.values():
            yield from _data_files(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
