"""The rows that a Python script loads with the library `datasets`, as far as its source states them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment_core.migrate.python_source import Source, Unreadable, argument, shown

FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Names with which ``load_dataset`` reads files."""
CURES = {
    "train_test_split": "set `test_rows` of the data, or add the held-out rows as a source with `held_out: true`",
    **dict.fromkeys(("rename_column", "rename_columns"), "name the columns in `columns` of the source"),
    **dict.fromkeys(("select", "take"), "set `rows` of the source"),
}
"""Remedies for methods that change a data set."""
WITHOUT_EFFECT = {
    *("shuffle", "with_format", "remove_columns", "select_columns", "flatten_indices", "to_iterable_dataset"),
}
"""Methods without a counterpart: rows are shuffled, and unused columns are not read."""
UNUSED = {"streaming", "num_proc", "cache_dir", "token", "keep_in_memory", "verification_mode", "features"}
"""Arguments of ``load_dataset`` without an effect here."""


@dataclass(frozen=True)
class Rows:
    """The place of the rows of a data set."""

    paths: tuple[str, ...] = ()
    """A name on the Hub, or files and folders."""
    subset: str | None = None
    split: str | None = None
    are_files: bool = False
    by_split: Any = None
    """The value of ``data_files``, if it has files by split."""

    def flags(self) -> dict[str, list[str]]:
        """The flags of TRL's commands for these rows."""
        if len(self.paths) > 1:
            return {"datasets": [str([{"path": path} for path in self.paths])]}
        flags = {"dataset_name": [*self.paths]}
        if self.subset:
            flags["dataset_config"] = [self.subset]
        if self.split and not self.are_files:
            flags["dataset_train_split"] = [self.split]
        return flags

    def of_split(self, split: str) -> Rows:
        """The rows of one split."""
        return self if not split else replace(self, split=split, paths=_paths(self.by_split, split) or self.paths)


def _paths(files: Any, split: str = "") -> tuple[str, ...]:
    files = files.get(split) if isinstance(files, dict) else files
    return tuple(map(str, files if isinstance(files, list) else [files] if files else []))


def rows_of(source: Source, node: ast.expr) -> Rows:
    """The rows of an expression: ``load_dataset(…)``, perhaps through a name, an index or a method. Raises Unreadable."""
    node = source.resolved(node)
    if isinstance(node, ast.Subscript):
        return rows_of(source, node.value).of_split(str(source.value(node.slice)))
    if not isinstance(node, ast.Call):
        raise source.unreadable(node)
    name = source.called(node)
    if name in ("load_dataset", "load_from_disk"):
        return _loaded(source, node, name)
    if name in {f"from_{kind}" for kind in FORMATS} and node.args:
        return Rows(_paths(source.value(node.args[0])), are_files=True)
    method = node.func
    if not isinstance(method, ast.Attribute) or isinstance(source.resolved(method.value), ast.Name):
        raise source.unreadable(node)  # of a class, or unknown
    rows = rows_of(source, method.value)
    if name not in WITHOUT_EFFECT:
        arguments = ", ".join(shown(part) for part in [*node.args, *(keyword.value for keyword in node.keywords)])
        cure = CURES.get(name, "write the rows as they are trained on to a file, and name that")
        source.notes.setdefault(
            f"`.{name}({arguments})` changes the rows, which the recipe does not: {cure}",
            method.end_lineno or node.lineno,
        )
    return rows


def _loaded(source: Source, node: ast.Call, function: str) -> Rows:
    given = source.arguments(node, ("path", "name"))
    values = {name: source.value(value) for name, value in given.items() if name not in UNUSED}
    path = values.pop("path", None)
    subset = values.pop("name", None)
    files = values.pop("data_files", None)
    split, _, part = str(values.pop("split", None) or "").partition("[")
    if not isinstance(path, str):
        raise source.unreadable(node)
    for name in values:
        source.note(node, f"`{argument(name, given[name])}` of load_dataset is not in the recipe")
    if part:
        source.note(node, f"`split` takes a part of the rows, `[{part}`: set `rows` of the source")
    if files is None:
        is_folder = function == "load_from_disk" and Path(path).expanduser().exists()
        return Rows((path,), subset, split or None, is_folder)
    if path not in FORMATS:
        raise Unreadable(node, f"`data_files` of {path!r}: name the files themselves as sources")
    by_split = files if isinstance(files, dict) else None
    return Rows(() if by_split else _paths(files), None, None, True, by_split).of_split(split if by_split else "")
