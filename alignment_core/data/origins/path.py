"""`path`: files, folders and data sets of the Hub; their exact content is pinned once, before anything is read."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.canonical import digest_of_file
from alignment_core.data.files import first_line, read_file
from alignment_core.data.hub import commit_of
from alignment_core.data.origins import Found, Origin, Pinned, located
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.paths import BEGINS, TEXT_SUFFIX, may_be_hub_name
from alignment_core.recipes.paths import ROW_SUFFIXES as SUFFIXES

if TYPE_CHECKING:
    from alignment_core.data.kinds import Kind
    from alignment_core.recipes.sections.data import DataSource

READABLE = (*SUFFIXES, TEXT_SUFFIX)
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Words at the start of a file name by which a folder's files are told apart, as `datasets` does."""
HELD_OUT = ".held-out.jsonl"
"""How a file ends that `align init` has written: rows to measure on, which are among those of the folder already."""


class FilesAndHub(Origin):
    """Labels mean what their author says."""

    description = (
        "Hub name (`Anthropic/hh-rlhf`), a JSONL, Parquet or CSV file, a folder of such files, or an Arrow folder. "
        "A folder's `*.held-out.jsonl`, which `align init` writes, is left out. "
        "A `.txt` file, or each one of a folder of them, is a row with the column `text`. Relative to the recipe's file."
    )
    has_options = False

    def pin(self, source: DataSource) -> dict[str, Any]:
        """Hash local files, ask the Hub for the commit of a name."""
        given = str(source.path)
        path = Path(given).expanduser()
        if may_be_hub_name(given):  # whatever lies in the working folder
            return {"hub_commit": commit_of(given, source.revision, "dataset", _nearest(path))}
        if path.is_dir():
            found = _files_of_folder(path, source.split)
        elif path.exists():
            if path.suffix not in READABLE:
                raise UserError(f"{given}: rows are read from {', '.join(READABLE)} files, not from {path.name!r}")
            found = [path]
        else:
            raise UserError(f"{given}: no such file or folder{_nearest(path)} ({BEGINS})")
        for name in ("subset", "revision"):
            if getattr(source, name) is not None:
                raise UserError(
                    f"{given}: `{name}` applies only to Hub data sets, but this is a file or folder; leave it out"
                )
        return {"files": tuple(_pinned_file(file) for file in found)}

    def name(self, pinned: Pinned) -> str:
        path = str(pinned.source.path)
        return path if pinned.hub_commit else Path(path).name  # no whole path: statistics are part of a shared artifact

    def content(self, pinned: Pinned) -> dict[str, Any]:
        """Digests instead of paths, a commit instead of a branch."""
        return {
            "files": [{"name": Path(file.path).name, "sha256": file.sha256} for file in pinned.files],
            "hub": f"{pinned.source.path}@{pinned.hub_commit}" if pinned.hub_commit else None,
        }

    def read(self, pinned: Pinned, seed: int, kind: Kind) -> Iterator[Found]:
        if pinned.hub_commit:
            yield from located(str(pinned.source.path), _hub(pinned))
        for file in pinned.files:
            path = Path(file.path)
            if not path.is_file() or digest_of_file(path) != file.sha256:
                raise DataError(f"{path}: is gone or has changed since this run started")
            for number, row in read_file(path):
                yield f"{path.name}:{number}", row

    def runs_others_code(self, pinned: Pinned) -> bool:
        return not pinned.files


ORIGIN = FilesAndHub()


def _hub(pinned: Pinned) -> Iterator[dict[str, Any]]:
    import datasets
    from huggingface_hub import constants

    source = pinned.source
    snapshot = cache_folder(str(source.path)) / "snapshots" / str(pinned.hub_commit)
    # Offline, `datasets` finds only what it has prepared before; the files of the snapshot itself are just as good.
    local = constants.is_offline_mode() and snapshot.is_dir()
    origin: dict[str, Any] = {"path": str(snapshot)} if local else {"path": source.path, "revision": pinned.hub_commit}
    try:
        rows = datasets.load_dataset(**origin, name=source.subset, split=source.split)
    except Exception as error:  # the loader raises whatever its readers, the network or the repository raise
        raise UserError(
            f"{source.path}@{pinned.hub_commit}: cannot load split {source.split!r}"
            f"{f' of {source.subset!r}' if source.subset else ''}: {first_line(error)}"
        ) from error
    yield from rows


def _pinned_file(path: Path) -> dict[str, Any]:
    try:
        return {"path": str(path), "sha256": digest_of_file(path), "size": path.stat().st_size}
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
    found = (path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    files = sorted(path for path in found if not path.name.endswith(HELD_OUT))
    if not files:  # beside files of rows, a text is a README
        files = sorted(path for path in folder.glob(f"*{TEXT_SUFFIX}") if path.is_file())
    if not files:
        raise UserError(f"{folder}: there is no {', '.join(READABLE)} file in this folder")
    by_split = {file: split_of_name(file.stem) for file in files}
    if not any(by_split.values()):
        return files
    chosen = [file for file in files if by_split[file] == split]
    if not chosen:
        known = sorted({name for name in by_split.values() if name})
        raise UserError(f"{folder}: has no file of split {split!r}; its files are of {', '.join(known)}")
    return chosen


def split_of_name(stem: str) -> str | None:
    """The split that a file of this name, without its suffix, says it holds."""
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
        raise UserError(f"{missing[0]}: is listed in state.json but missing from the folder")
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
