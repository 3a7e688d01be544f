"""The rows that `align init` reads: their files, the first of them, and the split to measure on."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from alignment_core.data import kinds
from alignment_core.data.fields import ArrowRow
from alignment_core.data.files import read_file
from alignment_core.data.folder import HELD_OUT, splits_by_name, splits_of
from alignment_core.data.origins import origin_of
from alignment_core.data.origins.path import check_readable
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.errors import DataError, UserError
from alignment_core.recipes import DataSource
from alignment_core.recipes.paths import BEGINS, ROW_SUFFIXES, TEXT_SUFFIX, is_address, may_be_hub_name, row_suffix

FIRST_ROWS = 1_000
"""Rows that are kept, measured, and held out from."""
FIRST_BYTES = 8 << 20
"""Bytes of JSON that are kept at most."""
COUNTED = 20_000
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""First words of the names of test splits, in order of preference."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows to train on."""

    name: str
    """The file, folder, glob or Hub name, as the user gave it."""
    sources: list[dict[str, Any]]
    """Sources of a recipe, with paths relative to the working folder."""
    first: list[Row]
    """The first readable rows."""
    count: int
    """Number of readable rows, up to :data:`COUNTED`."""
    all_counted: bool
    problems: list[str]
    """A sentence for each unreadable row among those that were counted."""
    files: list[Path] = field(default_factory=list)
    """Local files; none for the Hub."""
    test_sources: list[dict[str, Any]] = field(default_factory=list)
    """The test split, if the data set has one."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the choice of files and splits."""

    @property
    def count_in_words(self) -> str:
        if not self.all_counted:
            return f"more than {self.count:,} rows"
        return f"{self.count:,} row{'' if self.count == 1 else 's'}"


@contextmanager
def without_recipe_hints() -> Iterator[None]:
    """Remove hints about recipes from errors: here paths and names come from the command line."""
    try:
        yield
    except ValidationError as error:
        raise UserError("; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())) from None
    except UserError as error:
        raise type(error)(str(error).replace(f" ({BEGINS})", "")) from None


def written_as_path(path: str) -> str:
    """The path with `./` in front where it could be taken for a name."""
    return path if path.startswith((".", "/", "~")) else f"./{path}"


def candidates(folder: Path) -> list[str]:
    """The files of rows in a working folder: texts only if there are no others, and no .json files of settings. The folder
    itself where all its files are those of splits. Folders below it are not searched, as it may be a whole home."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    suffixes = {path.name: row_suffix(path.name) for path in files if not path.name.endswith(HELD_OUT)}
    texts = [name for name, suffix in suffixes.items() if suffix == TEXT_SUFFIX]
    others = [name for name, suffix in suffixes.items() if suffix not in (None, TEXT_SUFFIX)]
    names = [name for name in others if suffixes[name] != ".json" or _has_rows(folder / name)]
    return ["."] if _are_splits(folder, names) else names or texts


def _are_splits(folder: Path, names: list[str]) -> bool:
    """Whether the files are all those of a training split and others."""
    try:
        splits = splits_by_name(folder, [PurePath(name) for name in names]).splits
    except UserError:  # none of them is in a split
        return False
    in_splits = {path.name for files in splits.values() for path in files}
    return len(splits) > 1 and "train" in splits and in_splits == set(names)


def _has_rows(path: Path) -> bool:
    try:
        return isinstance(next(read_file(path), (0, ""))[1], dict)
    except (DataError, OSError):
        return False


@without_recipe_hints()
def find(name: str) -> Rows:
    """The rows of a file, folder, glob, address or Hub data set. Raises UserError if there are none."""
    path = Path(name).expanduser()
    if path.is_file():
        return _of_files(name, [path], [{"path": name}])
    if path.is_dir():
        return _of_folder(name, path)
    if is_address(name):
        name = str(DataSource(path=name).path)  # that of a whole repository is its name on the Hub
    elif glob.has_magic(name):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = [
            file for file in matches if file.is_file() and row_suffix(file.name) and not file.name.endswith(HELD_OUT)
        ]
        if not files:
            raise UserError(f"{name}: there is no {', '.join((*ROW_SUFFIXES, TEXT_SUFFIX))} file that fits it")
        return _of_files(name, files, [{"path": str(file)} for file in files])
    if may_be_hub_name(name):
        return _of_hub(name)
    return _of_pinned(pin(DataSource(path=name)), {"path": name})  # raises UserError for a path, with the nearest names


def _of_files(name: str, files: list[Path], sources: list[dict[str, Any]]) -> Rows:
    for file in files:
        check_readable(file, str(file))
    # files are not pinned here: hashing large ones takes longer than reading the first rows
    rows = (
        row if isinstance(row, dict) else f"{file.name}:{number} {row}"
        for file in files
        for number, row in read_file(file)
    )
    try:
        counted = _counted(name, sources, rows)
    except OSError as error:
        raise UserError(f"{error.filename or name}: cannot be read: {error.strerror}") from None
    if not counted.first:
        raise DataError(f"{name}: {_why_no_rows(files[0], counted.problems)}")
    return replace(counted, files=files)


def _counted(name: str, sources: list[dict[str, Any]], rows: Iterable[Row | str]) -> Rows:
    """Count rows and keep the first; a text stands for an unreadable row."""
    first, problems, count, size = list[Row](), list[str](), 0, 0
    remaining = iter(rows)
    for row in islice(remaining, COUNTED):
        if isinstance(row, str):
            problems.append(row)
            if len(problems) == FIRST_ROWS and not count:
                break
            continue
        count += 1
        if len(first) < FIRST_ROWS and size < FIRST_BYTES:
            # plain JSON, because these rows may be written to the held-out file
            first.append(row.unpadded() if isinstance(row, ArrowRow) else row)
            size += len(json.dumps(first[-1], default=str))
    return Rows(name, sources, first, count, next(remaining, None) is None, problems)


def _why_no_rows(file: Path, problems: list[str]) -> str:
    with file.open("rb") as opened:
        head = opened.read(2)
    if head in (b"\xff\xfe", b"\xfe\xff"):
        return f"is UTF-16, and rows are read as UTF-8: iconv -f UTF-16 -t UTF-8 {file.name} > utf8{file.suffix}"
    if head == b"\x1f\x8b":
        return "is compressed: unpack it with gunzip first"
    return f"none of its rows can be read: {problems[0]}" if problems else "has no rows"


def _of_folder(name: str, folder: Path) -> Rows:
    path = written_as_path(name)
    if (folder / "dataset_dict.json").exists():  # saved by datasets
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
    else:
        splits = [] if (folder / "state.json").exists() else list(splits_of(folder).splits)
    source, test_sources, notes = _by_split({"path": path}, splits)
    train = pin(DataSource.model_validate(source))
    rows = _of_files(name, [Path(file.path) for file in train.files], [source])
    return replace(rows, test_sources=test_sources, notes=[*notes, *train.notes])


def _of_hub(name: str) -> Rows:
    """The first rows of a Hub data set, which is downloaded now."""
    commit = pin(DataSource(path=name)).hub_commit
    subset, splits = _subset_and_splits(name, str(commit))
    source, test_sources, notes = _by_split({"path": name, **({"subset": subset} if subset else {})}, splits)
    pinned = PinnedSource(source=DataSource.model_validate(source), hub_commit=commit)
    return replace(_of_pinned(pinned, source), test_sources=test_sources, notes=notes)


def _of_pinned(pinned: PinnedSource, source: dict[str, Any]) -> Rows:
    """The first rows of a source outside this machine."""
    rows = (row for _, row in origin_of(pinned.source).read(pinned, 0, kinds.load("prompts")))
    counted = _counted(str(source["path"]), [source], rows)
    if not counted.first:
        raise DataError(f"{source['path']}: {counted.problems[0] if counted.problems else 'has no rows'}")
    return replace(counted, notes=list(pinned.notes))


def _subset_and_splits(name: str, commit: str) -> tuple[str | None, list[str]]:
    """The subset to read, if there are several, and its splits; empty if the Hub does not list them."""
    import datasets

    try:
        subsets = list(datasets.get_dataset_config_names(name, revision=commit))
        subset = None if "default" in subsets or len(subsets) < 2 else "main" if "main" in subsets else subsets[0]
        return subset, list(datasets.get_dataset_split_names(name, subset, revision=commit))
    except Exception:  # offline, or an unknown layout: reading the rows raises a better error
        return None, []


def _by_split(source: dict[str, Any], splits: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The source of the training split, that of the test split, and a note if the training split was a choice."""
    train = split_to_train(splits)
    test = split_to_test(splits, train)
    test_sources = [{**source, "split": test}] if test else []
    if train == "train":
        return source, test_sources, []
    note = f"`split: {train}` is read, of {', '.join(splits)}: set another in the recipe"
    return {**source, "split": train}, test_sources, [note]


def split_to_train(names: list[str]) -> str:
    """`train`, else the first split whose name begins so, else the first."""
    named = [name for name in names if name.startswith("train")]
    return "train" if "train" in names else (named or names or ["train"])[0]


def split_to_test(names: list[str], train: str) -> str | None:
    """The test split with the ending of the training split: `test_sft` for `train_sft`."""
    ending = train.removeprefix("train")
    wanted = [name for word in TEST_SPLITS for name in (f"{word}{ending}", word)]
    return next((name for name in wanted if name in names and name != train), None)
