"""Decide once, before anything is read, which exact bytes a data source stands for."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from alignment_core.canonical import digest_of_file
from alignment_core.data import formats, reasoning_gym, tasks, verifiers_tasksets
from alignment_core.data.hub import commit_of
from alignment_core.errors import UserError
from alignment_core.recipes.paths import BEGINS, may_be_hub_name
from alignment_core.recipes.paths import ROW_SUFFIXES as SUFFIXES
from alignment_core.recipes.sections.data import DataSource

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Words at the start of a file name by which a folder's files are told apart, as `datasets` does."""


class PinnedFile(BaseModel):
    """A file and the digest of its bytes at the time of pinning."""

    model_config = ConfigDict(frozen=True)

    path: str
    sha256: str
    size: int


class PinnedSource(BaseModel):
    """A source whose content can no longer change unnoticed."""

    model_config = ConfigDict(frozen=True)

    source: DataSource
    files: tuple[PinnedFile, ...] = ()
    hub_commit: str | None = None

    def content(self) -> dict[str, Any]:
        """What this source means, for stage keys: digests instead of paths, a commit instead of a branch."""
        source = self.source
        return {
            "files": [{"name": Path(file.path).name, "sha256": file.sha256} for file in self.files],
            "hub": f"{source.path}@{self.hub_commit}" if self.hub_commit else None,
            "task": source.task,
            **({"reasoning_gym": [source.reasoning_gym, reasoning_gym.version()]} if source.reasoning_gym else {}),
            **(
                {"verifiers": [source.verifiers, verifiers_tasksets.content(source.verifiers)]}
                if source.verifiers
                else {}
            ),
            **source.model_dump(mode="json", include=_MEANING),
        }

    @property
    def name(self) -> str:
        """How rows and statistics call this source; the same on every machine."""
        if self.source.task:
            return f"task:{self.source.task}/{self.source.split}"
        if self.source.reasoning_gym:
            return f"reasoning_gym:{self.source.reasoning_gym}/{self.source.split}"
        if self.source.verifiers:
            return f"verifiers:{self.source.verifiers}"
        if self.hub_commit:
            return str(self.source.path)
        return Path(str(self.source.path)).name  # not the whole path: statistics are part of a shared artifact


_MEANING = {"format", "columns", "split", "subset", "rows", "weight", "options"}


def pin(source: DataSource) -> PinnedSource:
    """Resolve a source: hash local files, ask the Hub for the commit of a name, check the name of a task.

    Raises UserError, in one sentence, for anything that could not be read later.
    """
    formats.check_columns(source.columns)
    if source.task is not None:
        tasks.check(source.task, source.split, source.options)
        return PinnedSource(source=source)
    if source.reasoning_gym is not None:
        reasoning_gym.check(source.reasoning_gym, source.split, source.options)
        return PinnedSource(source=source)
    if source.verifiers is not None:
        verifiers_tasksets.check(source.verifiers, source.split, source.options)
        return PinnedSource(source=source)
    given = str(source.path)
    path = Path(given).expanduser()
    if may_be_hub_name(given):  # whatever lies in the working folder
        return PinnedSource(source=source, hub_commit=commit_of(given, source.revision, "dataset", _nearest(path)))
    if path.is_dir():
        found = _files_of_folder(path, source.split)
    elif path.exists():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{given}: rows are read from {', '.join(SUFFIXES)} files, not from {path.name!r}")
        found = [path]
    else:
        raise UserError(f"{given}: no such file or folder{_nearest(path)} ({BEGINS})")
    for name in ("subset", "revision"):
        if getattr(source, name) is not None:
            raise UserError(
                f"{given}: `{name}` is for data sets of the Hub, and this is a file or folder; leave it out"
            )
    return PinnedSource(source=source, files=tuple(_pinned_file(file) for file in found))


def _pinned_file(path: Path) -> PinnedFile:
    try:
        return PinnedFile(path=str(path), sha256=digest_of_file(path), size=path.stat().st_size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _files_of_folder(folder: Path, split: str) -> list[Path]:
    """The files that hold a split, in an order that does not depend on the file system."""
    if (folder / "dataset_dict.json").exists():
        folder = folder / split
    if (folder / "state.json").exists():
        return _saved_to_disk(folder)
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
        raise UserError(f"{folder.parent}: has no split {split!r}; it has {', '.join(known) or 'none'}")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise UserError(f"{folder}: there is no {', '.join(SUFFIXES)} file in this folder")
    by_split = {file: _split_of_name(file.stem) for file in files}
    if not any(by_split.values()):
        return files
    chosen = [file for file in files if by_split[file] == split]
    if not chosen:
        known = sorted({name for name in by_split.values() if name})
        raise UserError(f"{folder}: has no file of split {split!r}; its files are of {', '.join(known)}")
    return chosen


def _split_of_name(stem: str) -> str | None:
    return next((split for split in SPLITS if re.match(rf"{split}([^A-Za-z]|$)", stem)), None)


def _saved_to_disk(folder: Path) -> list[Path]:
    """The Arrow files of ``datasets.save_to_disk``, in the order that its state file gives."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'state.json'}: is not the state file of a data set saved to disk") from None
    if not names:
        raise UserError(f"{folder}: the saved data set has no data files")
    files = [folder / name for name in names]
    missing = [file for file in files if Path(file.name) != file.relative_to(folder) or not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: is named by state.json and is not a file of the folder")
    return files


def _nearest(path: Path) -> str:
    """A hint that names up to three neighbours of a path that does not exist."""
    parent = path.parent
    if not parent.is_dir():
        existing = next((ancestor for ancestor in parent.parents if ancestor.is_dir()), Path("."))
        return f"; the folder {parent} does not exist either, {existing} does"
    near = difflib.get_close_matches(path.name, sorted(os.listdir(parent)), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(str(parent / name) for name in near)}?" if near else ""


def cache_folder(name: str) -> Path:
    """Where the Hub's own cache keeps a data set."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
