"""Where the rows are, which of them are for measuring, and what the first of them look like."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from alignment_core.data import kinds
from alignment_core.data.fields import ArrowRow, Fields
from alignment_core.data.files import read_file
from alignment_core.data.folder import HELD_OUT, configurations, splits_of
from alignment_core.data.origins import origin_of
from alignment_core.data.origins.path import check_readable
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.errors import DataError, UserError
from alignment_core.recipes import DataSource
from alignment_core.recipes.paths import BEGINS, ROW_SUFFIXES, TEXT_SUFFIX, may_be_hub_name, row_suffix

LOOKED_AT = 1_000
"""Rows that are looked at closely."""
COUNTED = 20_000
"""Rows that are counted, and among which some are chosen to be held out."""
MOST_BYTES = 64 << 20
"""Of rows that are kept in memory for it."""
TESTS = ("test", "validation", "valid", "val", "dev", "eval")
"""Words with which the names of splits to measure on begin, the best first."""


@dataclass(frozen=True)
class Rows:
    """The rows to train on."""

    named: str
    """What the user gave, or what was found."""
    sources: list[dict[str, Any]]
    """As a recipe has them, with paths as the user gave them."""
    first: list[dict[str, Any]]
    """The first rows that can be read."""
    count: int
    """How many there are, as far as they were counted."""
    whole: bool
    """Whether all were counted."""
    bad: list[str]
    """What is wrong with those among the first that cannot be read."""
    files: list[Path] = field(default_factory=list)
    """Those that hold them; none of the Hub's."""
    tests: list[dict[str, Any]] = field(default_factory=list)
    """Sources of rows that are kept apart for measuring, where the data come with some."""
    notes: list[str] = field(default_factory=list)
    """What to say about the files of a folder."""

    @property
    def words(self) -> str:
        """How many, for people."""
        return f"{self.count:,} row{'' if self.count == 1 else 's'}" if self.whole else f"more than {self.count:,} rows"


def candidates(folder: Path) -> list[str]:
    """What may be meant in a folder where nothing is named: files of rows, or the folder itself if they are its splits."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    suffixes = {path: row_suffix(path.name) for path in found if not path.name.endswith(HELD_OUT)}
    texts = [path for path, suffix in suffixes.items() if suffix == TEXT_SUFFIX]
    files = [path for path, suffix in suffixes.items() if suffix not in (None, TEXT_SUFFIX)]
    files = [path for path in files if suffixes[path] != ".json" or _has_rows(path)]  # most of them are settings
    if not files:
        return ["."] if len(texts) > 1 else [path.name for path in texts]
    splits = _named_splits(folder, files) if len(files) > 1 else {}
    all_in_splits = {*files} <= {path for split in splits.values() for path in split}
    return ["."] if len(splits) > 1 and "train" in splits and all_in_splits else [path.name for path in files]


def _named_splits(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The splits of a working folder whose ``files`` or README.md name a training split; others, which may be a whole home, are
    not searched."""
    try:
        if configurations(folder) or any("train" in path.name for path in files):
            return splits_of(folder).splits
    except UserError:
        pass  # a README.md about something else
    return {}


def _has_rows(path: Path) -> bool:
    try:
        return isinstance(next(read_file(path), (0, ""))[1], dict)
    except (DataError, OSError):
        return False


def find(named: str, keep_apart: bool = True) -> Rows:
    """The rows of a file, a folder, a glob or a data set of the Hub. Raises UserError where there are none.

    Without ``keep_apart`` nobody looks for rows to measure on.
    """
    try:
        return _found(named, keep_apart)
    except UserError as error:  # a sentence about a recipe's paths is none about an option's
        raise type(error)(str(error).replace(f" ({BEGINS})", "")) from None


def _found(named: str, keep_apart: bool) -> Rows:
    path = Path(named).expanduser()
    if path.is_file():
        return _of_files(named, [path], [{"path": named}])
    if path.is_dir():
        return _of_folder(named, path, keep_apart)
    if glob.has_magic(named):
        paths = sorted(Path(one) for one in glob.glob(str(path), recursive=True))
        files = [one for one in paths if one.is_file() and row_suffix(one.name) and not one.name.endswith(HELD_OUT)]
        if not files:
            raise UserError(f"{named}: there is no {', '.join((*ROW_SUFFIXES, TEXT_SUFFIX))} file that fits it")
        return _of_files(named, files, [{"path": str(one)} for one in files])
    if may_be_hub_name(named):
        return _of_hub(named, keep_apart)
    origin_of(DataSource(path=named)).pin(DataSource(path=named))  # says what is wrong with it
    raise UserError(f"{named}: no such file or folder")


def _of_files(named: str, files: list[Path], sources: list[dict[str, Any]], tests: Any = ()) -> Rows:
    for file in files:
        check_readable(file, str(file))
    found = (
        row if isinstance(row, dict) else f"{file.name}:{number} {row}" for file in files for number, row in _read(file)
    )
    first, count, whole, bad = _first(found)
    if not first:
        raise DataError(f"{named}: {_why_none(files[0], bad)}")
    return Rows(named, sources, first, count, whole, bad, files, list(tests))


def _read(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        yield from read_file(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None


def _first(found: Iterable[dict[str, Any] | str]) -> tuple[list[dict[str, Any]], int, bool, list[str]]:
    """The first rows, how many there are as far as they were counted, whether that is all, and what is wrong with others."""
    first, bad, count, size = list[dict[str, Any]](), list[str](), 0, 0
    rows = iter(found)
    for row in islice(rows, COUNTED):
        count += 1
        if isinstance(row, str):
            bad.append(row)
        elif len(first) < LOOKED_AT and size < MOST_BYTES:
            first.append(_plain(row))
            size += len(json.dumps(row, default=str))
        if len(bad) == LOOKED_AT and not first:
            break
    return first, count - len(bad), next(rows, None) is None, bad


def _why_none(file: Path, bad: list[str]) -> str:
    """A sentence for a file without a row that can be read."""
    with file.open("rb") as opened:
        head = opened.read(4)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"is UTF-16, and rows are read as UTF-8: iconv -f UTF-16 -t UTF-8 {file.name} > utf8{file.suffix}"
    if head[:2] == b"\x1f\x8b":
        return "is compressed: unpack it with gunzip first"
    if not bad:
        return "has no rows"
    return f"none of its rows can be read: {bad[0]}"


def _of_folder(named: str, folder: Path, keep_apart: bool) -> Rows:
    where = named if named.startswith((".", "/", "~")) else f"./{named}"  # no name of the Hub
    splits = _splits(folder)
    split = split_to_train(splits)
    test = split_to_test(splits, split)
    source = {"path": where, **({} if split == "train" else {"split": split})}
    train = _pinned(source)
    tests = [{"path": where, "split": test}] if test and keep_apart else []
    found = _of_files(named, [Path(file.path) for file in train.files], [source], tests)
    return replace(found, notes=[*_chosen(split, splits), *train.notes])


def _splits(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").exists():
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    return [] if (folder / "state.json").exists() else list(splits_of(folder).splits)


def _chosen(split: str, splits: list[str]) -> list[str]:
    """A sentence where the split to train on had to be chosen."""
    return [] if split == "train" else [f"`split: {split}` is read, of {', '.join(splits)}: set another in the recipe"]


def split_to_train(names: list[str]) -> str:
    """`train`, or else the first whose name begins so, or else the first."""
    return next(
        (name for name in ("train", *names) if name in names and name.startswith("train")), (names or ["train"])[0]
    )


def split_to_test(names: list[str], train: str) -> str | None:
    """The split to measure on: of `train_sft` rather `test_sft` than `test_prefs`."""
    ending = train.removeprefix("train")
    found = [name for word in TESTS for name in (f"{word}{ending}", word) if name in names and name != train]
    return found[0] if found else None


def _pinned(source: dict[str, Any]) -> PinnedSource:
    return pin(DataSource.model_validate(source))


def _of_hub(named: str, keep_apart: bool) -> Rows:
    """The rows as a run would read them; they are downloaded now."""
    source: dict[str, Any] = {"path": named}
    commit = _pinned(source).hub_commit
    subset, splits = _parts_of_hub(named, str(commit))
    source |= {"subset": subset} if subset else {}
    train = split_to_train(splits)
    if train != "train":
        source["split"] = train
    test = split_to_test(splits, train)
    tests = [{**source, "split": test}] if test else []
    pinned = PinnedSource(source=DataSource.model_validate(source), hub_commit=commit)
    rows = (row for _, row in origin_of(pinned.source).read(pinned, 0, kinds.load("prompts")))
    first, count, whole, bad = _first(rows)
    if not first:
        raise DataError(f"{named}: has no rows")
    return Rows(named, [source], first, count, whole, bad, [], tests if keep_apart else [], _chosen(train, splits))


def _parts_of_hub(named: str, commit: str) -> tuple[str | None, list[str]]:
    """The subset to take, where there are several, and its splits; nothing where the Hub does not say."""
    import datasets

    try:
        subsets = list(datasets.get_dataset_config_names(named, revision=commit))
        subset = None if "default" in subsets or len(subsets) < 2 else "main" if "main" in subsets else subsets[0]
        return subset, list(datasets.get_dataset_split_names(named, subset, revision=commit))
    except Exception:  # offline, or a layout that the library cannot look through: reading it says what is wrong
        return None, []


def some_to_hold_out(sources: list[dict[str, Any]], kind: kinds.Kind, format: str, count: int) -> list[dict[str, Any]]:
    """Rows of about ``count`` prompts among the first rows: whole groups of rows that share prompts, see
    :func:`alignment_core.data.hold_out.groups`, those with the smallest names, none with more than a fifth of the rows.

    Which rows these are depends on their prompts alone, so that more rows change few of them.
    """
    from alignment_core.data.hold_out import groups, prompts_of

    rows: list[dict[str, Any]] = []
    prompts: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    size = 0
    for source in sources:
        columns = source.get("columns", {})
        for row in islice(every(source), COUNTED):
            try:
                prompts.append(prompts_of(kind.formats[format].parse(Fields(row, columns)), last_turn=False))
            except (ValueError, IndexError, TypeError, RecursionError):
                continue
            rows.append(row)
            size += len(json.dumps(row, default=str))
            if size > MOST_BYTES:
                break
    by_group: dict[str, list[dict[str, Any]]] = {}
    for name, row in zip(groups(prompts), rows, strict=True):
        by_group.setdefault(name, []).append(row)
    small = sorted(name for name, group in by_group.items() if len(group) * 5 <= len(rows))
    return [row for name in small[: min(count, len(by_group) // 5)] for row in by_group[name]]


def every(source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a source that can be read."""
    described = DataSource.model_validate(source)
    path = Path(str(described.path)).expanduser()
    if path.is_file():
        found: Iterator[Any] = (row for _, row in read_file(path))
    else:
        pinned = pin(described)
        found = (row for _, row in origin_of(described).read(pinned, 0, kinds.load("prompts")))
    yield from (_plain(row) for row in found if isinstance(row, dict))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON Lines would hold it: what `align init` sees of a row, it may write there."""
    return row.unpadded() if isinstance(row, ArrowRow) else row
