"""The rows that a Python script loads with the library `datasets`, as its source writes them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment_core.migrate.trl.expressions import Source, Unreadable, argument, shown

FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Names with which ``load_dataset`` reads files."""
FROM_FILES = {"from_json", "from_csv", "from_parquet", "from_text"}
LOADS = ("load_dataset", "load_from_disk")
CURES = {
    "train_test_split": "set `test_rows` of the data, or name the held-out rows as a source with `held_out: true`",
    "rename_column": "name the columns in `columns` of the source",
    "rename_columns": "name the columns in `columns` of the source",
    "select": "set `rows` of the source",
    "take": "set `rows` of the source",
}
"""What to do for methods that change a data set."""
WITHOUT_EFFECT = (
    "shuffle",
    "with_format",
    "remove_columns",
    "select_columns",
    "flatten_indices",
    "to_iterable_dataset",
)
"""Methods for which there is nothing to do: rows are shuffled, and columns that nobody asks for are not read."""
UNUSED = ("streaming", "num_proc", "cache_dir", "token", "keep_in_memory", "verification_mode", "features")
"""Arguments of ``load_dataset`` that decide nothing here."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of a data set are."""

    paths: tuple[str, ...]
    """A name on the Hub, or files and folders."""
    subset: str | None = None
    split: str | None = None
    are_files: bool = False
    by_split: Any = None
    """Files by split, where ``data_files`` has them so."""
    changes: tuple[tuple[int, str], ...] = ()
    """Lines and sentences of what the script does to the rows, and the recipe does not."""

    def flags(self) -> dict[str, list[str]]:
        """As TRL's CLI has it."""
        if len(self.paths) > 1:
            return {"datasets": [str([{"path": path} for path in self.paths])]}
        found = {"dataset_name": [*self.paths]}
        if self.subset:
            found["dataset_config"] = [self.subset]
        if self.split and not self.are_files:
            found["dataset_train_split"] = [self.split]
        return found


def rows_of(source: Source, node: ast.expr) -> Rows:
    """The rows of an expression: ``load_dataset(…)``, perhaps through a name, an index or a method. Raises Unreadable."""
    node = source.resolved(node)
    if isinstance(node, ast.Subscript):
        return _of_split(rows_of(source, node.value), str(source.value(node.slice)))
    if not isinstance(node, ast.Call):
        raise source.unreadable(node)
    name = source.called(node)
    if name in LOADS:
        return _loaded(source, node)
    if name in FROM_FILES and node.args:
        paths = source.value(node.args[0])
        return Rows(tuple(map(str, paths if isinstance(paths, list) else [paths])), are_files=True)
    method = node.func
    if not isinstance(method, ast.Attribute) or isinstance(
        source.resolved(method.value), ast.Name
    ):  # of a class, or unknown
        raise source.unreadable(node)
    before = rows_of(source, method.value)
    if name in WITHOUT_EFFECT:
        return before
    arguments = ", ".join(shown(one) for one in [*node.args, *(keyword.value for keyword in node.keywords)])
    cure = CURES.get(name, "write the rows as they are trained on to a file, and name that")
    change = f"`.{name}({arguments})` changes the rows, which the recipe does not: {cure}"
    return replace(before, changes=(*before.changes, (method.end_lineno or node.lineno, change)))


def _loaded(source: Source, node: ast.Call) -> Rows:
    given = dict(zip(("path", "name"), node.args, strict=False))
    given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
    values = {name: source.value(one) for name, one in given.items() if name not in UNUSED}
    path, split, files = values.pop("path", None), values.pop("split", None), values.pop("data_files", None)
    subset = values.pop("name", None)
    if not isinstance(path, str):
        raise source.unreadable(node)
    changes = [
        (node.lineno, f"`{argument(name, given[name])}` of load_dataset is not in the recipe") for name in values
    ]
    changes += [(node.lineno, f"`{shown(one)}` of load_dataset has no name: it is not read") for one in node.args[2:]]
    split, _, part = str(split or "").partition("[")
    if part:
        changes.append((node.lineno, f"`split` takes a part of the rows, `[{part}`: set `rows` of the source"))
    if files is None:
        is_folder = Path(path).expanduser().exists()
        return Rows((path,), subset, split or None, is_folder and source.called(node) == LOADS[1], None, tuple(changes))
    if path not in FORMATS:
        raise Unreadable(node, f"`data_files` of {path!r}: name the files themselves as sources")
    found = Rows((), None, None, True, files if isinstance(files, dict) else None, tuple(changes))
    if found.by_split:
        return _of_split(found, split) if split else found
    return replace(found, paths=tuple(map(str, files if isinstance(files, list) else [files])))


def _of_split(rows: Rows, split: str) -> Rows:
    if rows.by_split is None:
        return replace(rows, split=split)
    files = rows.by_split.get(split, ())
    return replace(rows, paths=tuple(files) if isinstance(files, list | tuple) else (str(files),))
