"""Prompts of the tasksets of `verifiers`, a library of environments (extra `environments`), and their part of stage keys."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.canonical import digest_of
from alignment_core.credentials import cut, resolved
from alignment_core.data.origins import DEFAULT_ROWS, Library, Pinned
from alignment_core.errors import UserError, one_line
from alignment_core.source_code import digest_of_source

if TYPE_CHECKING:
    from alignment_core.recipes.sections.data import DataSource

FIELD = "verifiers"


def loaders(field: str = FIELD) -> Any:
    """The package's module that finds tasksets and environments. Raises UserError if it is not installed."""
    try:
        import verifiers.v1.utils.loaders
    except ModuleNotFoundError as error:
        raise UserError(f"{field}: {error}; install the extra: pip install 'alignment[environments]'") from None
    return verifiers.v1.utils.loaders


def content(taskset: str, environment: str = "", field: str = FIELD) -> dict[str, Any]:
    """The part of stage keys that identifies tasks and rewards, beside the options: the package's version and a digest of
    the Python sources of the taskset's module or package, and of the environment's, if it is named.

    Raises UserError if there is no such module.
    """
    library = loaders(field)
    modules = {"taskset": (library.import_taskset, taskset), "environment": (library.import_environment, environment)}
    try:
        sources = {kind: _sources(find(name)) for kind, (find, name) in modules.items() if name}
    except Exception as error:  # an installed package's code runs here
        raise problem(field, taskset, error) from None
    return {"verifiers": importlib.metadata.version("verifiers"), **sources}


def _sources(module: Any) -> str:
    file = Path(str(module.__file__))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return digest_of(
        [[path.relative_to(file.parent).as_posix(), digest_of_source(path.read_bytes())] for path in files]
    )


def check(name: str, split: str, options: dict[str, Any]) -> None:
    """Raise UserError if there is no such taskset, if it refuses the options, has no task, or others each time."""
    if split != "train":
        raise UserError(f"{FIELD}: {name!r} has no splits; choose its rows with the options of the taskset")
    first, second = (next(_tasks(name, load(name, options)), None) for _ in range(2))
    if first is None or second is None:
        raise UserError(f"{FIELD}: {name!r} with the options {options} has no tasks")
    if first.data != second.data:
        raise UserError(f"{FIELD}: {name!r} gives different tasks each time; does it have an option for a seed?")


def rows(name: str, count: int | None, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each task (of an endless taskset for the first ``count``, by default ``DEFAULT_ROWS``): the text of its
    prompt, and as the label its number in the taskset, from 0. Raises UserError for a task that cannot be made.
    """
    taskset = load(name, options)
    limit = None if taskset.bounded else count or DEFAULT_ROWS
    for number, task in enumerate(islice(_tasks(name, taskset), limit)):
        yield {"prompt": task.data.prompt_text or f"{name}: task {number}", "label": str(number)}


def load(name: str, options: dict[str, Any]) -> Any:
    """A taskset of `verifiers`. Raises UserError if there is none of this name, or none with these options."""
    library, options = loaders(), resolved(options, "options")
    try:
        # A copy, because the validation fills in defaults.
        config = library.taskset_config_type(name).model_validate({**copy.deepcopy(options), "id": name})
        return library.load_taskset(config)
    except Exception as error:  # an installed package's code runs here
        raise problem(FIELD, name, error) from None


def _tasks(name: str, taskset: Any) -> Iterator[Any]:
    try:
        yield from taskset
    except Exception as error:  # an installed package's code runs here
        raise problem(FIELD, name, error) from None


def problem(field: str, name: str, error: Exception) -> UserError:
    """The sentence about an error that `verifiers`, or a package made for it, raised."""
    return UserError(f"{field}: {name!r}: {type(error).__name__}: {cut(one_line(error))}")


class Tasksets(Library):
    """Labels are the numbers of the tasks, by which environments find them."""

    samples_rows = True

    description = (
        "Name of a taskset of verifiers (extra `environments`), for prompts; its environments give the reward."
    )

    def pin(self, source: DataSource) -> dict[str, Any]:
        check(source.origin, source.split, source.options)
        return {}

    def name(self, pinned: Pinned) -> str:
        return f"{FIELD}:{pinned.source.origin}"

    def content(self, pinned: Pinned) -> dict[str, Any]:
        return content(pinned.source.origin)

    def prompts(self, source: DataSource, seed: int) -> Iterator[dict[str, Any]]:
        return rows(source.origin, source.rows, source.options)


ORIGIN = Tasksets()
