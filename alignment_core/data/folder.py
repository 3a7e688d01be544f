"""The files of a folder by split, as `datasets.load_dataset(folder)` assigns them, and the files that are left out.

The rules are those of `datasets` 5 (`data_files.py`, `load.py`), written anew because recipes are checked without importing the
library: the configurations in README.md, else shards `data/SPLIT-00000-of-00001`, else folders named by a split, else files
named by one, else one split `train`; of these files those of the most frequent suffix. Differences, on purpose:

* each `.txt` file is one row, and is read only where there are no other rows;
* shards such as `train_sft-00000-of-00002` are splits of their own beside `data/`, too, where `datasets` would mix them;
* a file such as `rows.jsonl.bak` holds no rows;
* splits need not have the same suffix, and the whole name of a file before its suffix names a split, too.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from alignment_core.errors import UserError
from alignment_core.recipes.paths import ROW_SUFFIXES, TEXT_SUFFIX, row_suffix

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders that mean a split."""
HELD_OUT = ".held-out.jsonl"
"""Suffix of held-out rows that `align init` writes; a folder does not read them a second time."""
_SEPARATOR = "[-._ 0-9]"
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*")
_SETTINGS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_NO_ROWS = re.compile(
    r"(readme|licen[sc]e|notice|changelog|requirements)\b|(.*_config|tokenizer|special_tokens_map|vocab|.*\.index)\.json$",
    re.IGNORECASE,
)
"""Names of texts about a data set, and of a model's settings."""
_HIDDEN = (".", "__")
"""Prefixes of folders without rows."""
_OTHER_ROWS = (".tsv", ".xml", ".zip", ".tar", ".tgz", ".h5", ".hdf5", ".xlsx", ".lance", ".avro", ".orc")
"""Suffixes of other files that hold rows."""
_TOGETHER = {".jsonl": ".json", ".ndjson": ".json"}
"""Suffixes that count as another one: their files are read together."""
_PREFERRED = (".csv", ".json", ".jsonl", ".arrow", ".parquet")
"""If two suffixes are equally frequent, the later one wins."""
_LISTED = 5


@dataclass(frozen=True)
class Folder:
    """The splits of a folder of rows."""

    path: Path | str
    splits: dict[str, list[Any]]
    """The files of each split, in the order in which they are read."""
    notes: list[str] = field(default_factory=list)
    """Sentences about files that are left out."""

    def of(self, split: str) -> list[Any]:
        """The files of a split, of a word for it, or of the files with this name.

        Raises UserError that lists the splits.
        """
        if split in self.splits:
            return self.splits[split]
        named = {path: None for files in self.splits.values() for path in files if _is_named(path, split)}
        if not named:
            raise UserError(f"{self.path}: has no split {split!r}; it has {', '.join(self.splits)}")
        return list(named)


def splits_of(folder: Path, subset: str | None = None) -> Folder:
    """The splits of a folder; ``subset`` names a configuration of its README.md.

    Raises UserError for a folder without rows, and for a configuration that does not exist.
    """
    if named := configurations(folder):
        return Folder(folder, _of_configuration(folder, named, subset))
    if subset is not None:
        raise UserError(
            f"{folder}: `subset` applies only to data sets with several: there are none in a README.md here"
        )
    relative = splits_by_name(folder, list(_files(folder)))
    splits = {split: [folder / path for path in files] for split, files in relative.splits.items()}
    return Folder(folder, splits, relative.notes)


def splits_by_name(folder: Path | str, every: list[PurePath]) -> Folder:
    """The splits of a folder, local or at an address, by the relative paths of its files.

    Raises UserError if none of them holds rows.
    """
    every = sorted(filter(_counts, every), key=PurePath.as_posix)
    splits = {split: _of_one_format(files) for split, files in _by_name(every).items()}
    left_out = _left_out(every, {path for files in splits.values() for path in files})
    if not splits:
        only = f", only {_listed(left_out)}" if left_out else ""
        raise UserError(f"{folder}: there is no {', '.join((*ROW_SUFFIXES, TEXT_SUFFIX))} file in this folder{only}")
    notes = [f"left out of the folder, as `datasets` does: {_listed(left_out)}"] if left_out else []
    return Folder(folder, dict(splits), notes)


def _files(folder: Path) -> Iterator[PurePath]:
    """The relative paths of all files below the folder, sorted; hidden folders are not searched."""
    paths = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        paths += [path.relative_to(folder) for name in names if (path := Path(root, name)).is_file()]
    return iter(sorted(filter(_counts, paths), key=PurePath.as_posix))


def _counts(path: PurePath) -> bool:
    """Whether the file may belong to the data: neither hidden nor a file of settings."""
    hidden = path.name.startswith(".") or any(part.startswith(_HIDDEN) for part in path.parts[:-1])
    return not hidden and path.name not in _SETTINGS and not path.name.endswith(HELD_OUT)


def _is_read(path: PurePath) -> bool:
    """Whether rows are read from the file; `datasets` wants suffixes of a folder's files in lower case."""
    return row_suffix(path.name) is not None and row_suffix(path.name) == row_suffix(path.name, as_written=True)


def _by_name(every: list[PurePath]) -> dict[str, list[PurePath]]:
    """The files of each split, by their relative paths."""
    files = [path for path in every if _is_read(path)]
    files = [path for path in files if row_suffix(path.name) != TEXT_SUFFIX] or files
    of_data = _shards(path for path in files if path.parent == PurePath("data"))
    if of_data:
        return of_data
    of_folder = _shards(path for path in files if path.parent == PurePath())
    if any(len(endings) > 1 for endings in _endings(of_folder).values()):
        return of_folder
    for patterns in (_FOLDERS, _NAMES):
        splits = {}
        for split, of_split in patterns.items():
            matches = dict.fromkeys(
                path for pattern in of_split for path in files if pattern.fullmatch(path.as_posix())
            )
            if matches:
                splits[split] = list(matches)
        if splits:
            return splits
    return {"train": files} if files else {}


def _patterns(pattern: str) -> dict[str, list[re.Pattern[str]]]:
    """For each split, patterns of the relative paths of its files."""
    return {split: [re.compile(pattern.format(word)) for word in words] for split, words in KEYWORDS.items()}


_FOLDERS = _patterns(rf"(.*/)?([^/]*{_SEPARATOR})?{{}}({_SEPARATOR}[^/]*)?/.*")
_NAMES = _patterns(rf"(.*/)?([^/]*{_SEPARATOR})?{{}}{_SEPARATOR}[^/]*")


def _shards(files: Iterable[PurePath]) -> dict[str, list[PurePath]]:
    """Shards by the split in their names; train, validation and test come first."""
    shards: dict[str, list[PurePath]] = {}
    for path in files:
        if match := _SHARD.fullmatch(path.name):
            shards.setdefault(match[1], []).append(path)
    return {split: shards[split] for split in (*KEYWORDS, *sorted(shards.keys() - KEYWORDS)) if split in shards}


def _endings(names: Iterable[str]) -> dict[str, set[str]]:
    """Suffixes behind the word of a split, by split, without numbers: `sft` and `prefs` of `train_sft` and `train_prefs`."""
    endings: dict[str, set[str]] = {}
    for name in names:
        for split, words in KEYWORDS.items():
            if match := re.match(rf"({'|'.join(words)})(?:$|{_SEPARATOR}+(.*))", name):
                endings.setdefault(split, set()).add(re.sub(r"\d", "", match[2] or ""))
    return endings


def _stem(path: PurePath) -> str:
    """The name of a file before its suffix and the number of its shard."""
    match = _SHARD.fullmatch(path.name)
    return match[1] if match else path.name[: path.name.lower().rindex(str(row_suffix(path.name)))]


def _is_named(path: PurePath, split: str) -> bool:
    """Whether a file has this name, or begins with the word ``split`` where that is another word for a split (`dev`)."""
    words = [word for words in KEYWORDS.values() for word in words if word not in KEYWORDS]
    return _stem(path) == split or (split in words and re.match(rf"{split}{_SEPARATOR}", path.name) is not None)


def _of_one_format(files: list[PurePath]) -> list[PurePath]:
    """The files with the most frequent suffix."""
    counts = Counter(row_suffix(path.name) for path in files)
    first = max(counts, key=lambda suffix: (counts[suffix], _PREFERRED.index(suffix) if suffix in _PREFERRED else -1))
    return [path for path in files if _format(path) == _TOGETHER.get(str(first), first)]


def _format(path: PurePath) -> str:
    suffix = str(row_suffix(path.name))
    return _TOGETHER.get(suffix, suffix)


def _left_out(every: list[PurePath], used: set[PurePath]) -> list[str]:
    """Relative paths of unused files with names of files of rows."""
    names = (*ROW_SUFFIXES, TEXT_SUFFIX, *_OTHER_ROWS)
    return [
        path.as_posix()
        for path in every
        if path not in used
        and not _NO_ROWS.match(path.name)
        and any(f"{suffix}." in f"{path.name.lower()}." for suffix in names)
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def mixed(split: str, files: Sequence[PurePath]) -> list[str]:
    """A note if the files of a split have names of several splits."""
    if len(_endings(map(_stem, files)).get(split, ())) < 2:
        return []
    names = list(dict.fromkeys(map(_stem, files)))
    return [
        f"split {split!r} reads {_listed(names)} together, as `datasets` does; `split: {names[0]}` reads the file of this name "
        "alone"
    ]


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations in the YAML in front of README.md, as the Hub has them: the files to read, by name."""
    import yaml

    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    match = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        content = yaml.safe_load(match[1]) if match else None
        configs = content.get("configs") or [] if isinstance(content, dict) else []
        return {str(settings["config_name"]): settings for settings in configs}
    except (yaml.YAMLError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"{readme}: `configs` is not readable: {' '.join(str(error).split())}") from None


def _of_configuration(folder: Path, named: dict[str, dict[str, Any]], subset: str | None) -> dict[str, list[Path]]:
    """The files of each split of a configuration: that of the ``subset``, the only one, or the default."""
    readme = folder / "README.md"
    default = [name for name, settings in named.items() if name == "default" or settings.get("default")]
    name = subset or (default[0] if default else next(iter(named)))
    if name not in named or (subset is None and not default and len(named) > 1):
        problem = f"has no configuration {name!r}" if subset else "has several configurations"
        raise UserError(f"{readme}: {problem}; set `subset` to one of {', '.join(named)}")
    settings = named[name]
    place = folder / str(settings.get("data_dir") or "")
    data_files = settings.get("data_files")
    if isinstance(data_files, dict) or data_files == []:
        raise UserError(
            f"{readme}: `data_files` of {name!r} must be a path, or a list of paths or of `split` and `path`"
        )
    if data_files is None:
        by_name = _by_name(list(_files(place)))
        splits = {split: [place / path for path in _of_one_format(files)] for split, files in by_name.items()}
    else:
        items = data_files if isinstance(data_files, list) else [data_files]
        by_split = items if isinstance(items[0], dict) else [{"split": "train", "path": items}]
        splits = {str(item.get("split")): _matching(place, item.get("path")) for item in by_split}
    if missing := [split for split, files in splits.items() if not files]:
        raise UserError(f"{readme}: configuration {name!r} names no file of rows that is here for split {missing[0]}")
    if not splits:
        raise UserError(f"{place}: there is no {', '.join((*ROW_SUFFIXES, TEXT_SUFFIX))} file in this folder")
    return splits


def _matching(folder: Path, patterns: Any) -> list[Path]:
    """The files of rows that globs name, in the order of the globs."""
    paths: dict[Path, None] = {}
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        names = sorted(Path(name).as_posix() for name in glob.glob(str(pattern), root_dir=folder, recursive=True))
        paths |= {path: None for name in names if (path := folder / name).is_file() and _is_read(path)}
    return list(paths)
