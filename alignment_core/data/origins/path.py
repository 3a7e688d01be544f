"""`path`: files, folders, addresses and data sets of the Hub; their exact content is pinned once, before anything is read."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from alignment_core.canonical import digest_of_file
from alignment_core.data.addresses import is_glob, is_of_address, is_same, name_within, pinned_files
from alignment_core.data.fields import ArrowRow
from alignment_core.data.files import read_file
from alignment_core.data.folder import mixed, splits_by_name, splits_of
from alignment_core.data.hub import cache_folder, commit_of, is_offline
from alignment_core.data.origins import LocatedRow, Origin, Pinned, located
from alignment_core.errors import AlignmentError, DataError, UserError, first_line
from alignment_core.recipes.paths import (
    BEGINS,
    COMPRESSIONS,
    ROW_SUFFIXES,
    TEXT_SUFFIX,
    file_of,
    is_address,
    may_be_hub_name,
    row_suffix,
)

if TYPE_CHECKING:
    from alignment_core.data.kinds import Kind
    from alignment_core.recipes.sections.data import DataSource


class FilesAndHub(Origin):
    """Labels mean what their author says."""

    description = (
        "Hub name (`Anthropic/hh-rlhf`), a JSONL, Parquet or CSV file, a folder of such files, or an Arrow folder. "
        "A folder's `*.held-out.jsonl`, which `align init` writes, is left out. "
        "A folder means what `datasets` means by it: splits by configurations in README.md, by shards in `data/`, by names of "
        "folders or files, and the most frequent suffix. Text formats may be compressed (`.jsonl.gz`, `.zst`). "
        "A `.txt` file, or each one of a folder of them, is a row with the column `text`. Relative to the recipe's file. "
        "Or an address: `s3://bucket/rows/*.parquet`, `gs://…`, `https://…`, `hf://datasets/…`."
    )
    has_options = False
    samples_rows = True

    def pin(self, source: DataSource) -> dict[str, Any]:
        """Hash local files, ask the Hub for the commit of a name and other servers for the versions of files."""
        given = str(source.path)
        if is_address(given):
            return _at_address(given, source)
        path = Path(given).expanduser()
        if may_be_hub_name(given):  # a file of that name in the working folder is written as ./org/name
            return {"hub_commit": commit_of(given, source.revision, "dataset", _nearest(path))}
        notes: list[str] = []
        if path.is_dir():
            files, notes = _folder(path, source.split, source.subset)
        elif path.exists():
            check_readable(path, given)
            files = [path]
        else:
            raise UserError(f"{given}: no such file or folder{_nearest(path)} ({BEGINS})")
        for name in ("revision",) if path.is_dir() else ("subset", "revision"):
            if getattr(source, name) is not None:
                raise UserError(
                    f"{given}: `{name}` applies only to Hub data sets, but this is a file or folder; leave it out"
                )
        pinned = tuple(_pinned_file(file) for file in files)
        return {"files": pinned, "notes": tuple(notes)}

    def name(self, pinned: Pinned) -> str:
        path = str(pinned.source.path)
        if pinned.remote:
            return file_of(path).rstrip("/").rpartition("/")[2]
        return path if pinned.hub_commit else Path(path).name  # no whole path: statistics are part of a shared artifact

    def content(self, pinned: Pinned) -> dict[str, Any]:
        """Digests instead of paths, a commit instead of a branch. What a web server says of a file's content (often the time
        of its change) means something beside its address alone."""
        remote = [
            {
                "name": name_within(str(pinned.source.path), file),
                "version": file.version,
                "size": file.size,
                **({"address": file.address} if is_of_address(file) else {}),
            }
            for file in pinned.remote
        ]
        return {
            "files": [
                {"name": _name_in_source(pinned, Path(file.path)), "sha256": file.sha256} for file in pinned.files
            ],
            **({"remote": remote} if remote else {}),
            "hub": f"{pinned.source.path}@{pinned.hub_commit}" if pinned.hub_commit else None,
        }

    def read(self, pinned: Pinned, seed: int, kind: Kind) -> Iterator[LocatedRow]:
        if pinned.hub_commit:
            yield from located(str(pinned.source.path), _hub(pinned))
        for file in pinned.files:
            path = Path(file.path)
            if not path.is_file() or digest_of_file(path) != file.sha256:
                raise DataError(f"{path}: is gone or has changed since this run started")
            name = _name_in_source(pinned, path)
            for number, row in read_file(path):
                yield f"{name}:{number}", row
        for remote in pinned.remote:
            name = name_within(str(pinned.source.path), remote)
            for number, row in read_file(remote):
                yield f"{name}:{number}", row
            remote.check()

    def folders(self, pinned: Pinned) -> Mapping[str, str]:
        paths = (Path(file.path) for file in pinned.files)
        local = {_name_in_source(pinned, path): str(path.parent.absolute()) for path in paths}
        remote = {
            name_within(str(pinned.source.path), file): file.address.partition("?")[0].rpartition("/")[0]
            for file in pinned.remote
        }
        return {**local, **remote}

    def runs_others_code(self, pinned: Pinned) -> bool:
        return pinned.hub_commit is not None


ORIGIN = FilesAndHub()


def check_readable(path: PurePath, given: str) -> None:
    """Raise UserError for a file that rows are not read from."""
    if row_suffix(path.name) is None:
        suffixes = ", ".join((*ROW_SUFFIXES, TEXT_SUFFIX))
        raise UserError(
            f"{given}: rows are read from {suffixes} files, not from {path.name!r}; text formats may be compressed "
            f"({', '.join(COMPRESSIONS)})"
        )


def _at_address(address: str, source: DataSource) -> dict[str, Any]:
    """The files at an address: those of the split, where it is that of a folder."""
    if source.subset is not None:
        raise UserError(f"{address}: `subset` applies only to Hub data sets and local folders; leave it out")
    if source.revision is not None and not address.startswith("hf://"):
        raise UserError(f"{address}: `revision` applies only to the Hub; leave it out")
    try:
        pins = pinned_files(address, source.revision)
    except AlignmentError as error:
        raise type(error)(f"path: {error}") from error
    names = {PurePosixPath(name_within(address, file)): file for file in pins}
    if is_glob(address) or is_same(address, pins[0]):
        for file in pins:
            check_readable(PurePosixPath(file.name), file.address)
        return {"remote": tuple(pins)}
    folder = splits_by_name(address, list(names))
    files = folder.of(source.split)
    return {"remote": tuple(names[path] for path in files), "notes": (*folder.notes, *mixed(source.split, files))}


def _hub(pinned: Pinned) -> Iterator[dict[str, Any]]:
    import datasets

    source = pinned.source
    snapshot = cache_folder(str(source.path), "dataset") / "snapshots" / str(pinned.hub_commit)
    # Offline, `datasets` finds only data that it has prepared before; the files of the snapshot itself are equivalent.
    local = is_offline("dataset") and snapshot.is_dir()
    origin: dict[str, Any] = {"path": str(snapshot)} if local else {"path": source.path, "revision": pinned.hub_commit}
    try:
        rows = datasets.load_dataset(**origin, name=source.subset, split=source.split)
    except Exception as error:  # the loader raises whatever its readers, the network or the repository raise
        raise UserError(
            f"{source.path}@{pinned.hub_commit}: cannot load split {source.split!r}"
            f"{f' of {source.subset!r}' if source.subset else ''}: {first_line(error)}"
        ) from error
    if "Image(" in str(rows.features):  # as bytes and paths, not as decoded pictures
        for batch in rows.with_format("arrow").iter(1024):
            yield from map(ArrowRow, batch.to_pylist())
        return
    yield from map(ArrowRow, rows)


def _name_in_source(pinned: Pinned, path: Path) -> str:
    """Name of a file in rows: its place within a folder, else its name."""
    folder = Path(str(pinned.source.path)).expanduser()
    return path.relative_to(folder).as_posix() if folder in path.parents else path.name


def _pinned_file(path: Path) -> dict[str, Any]:
    try:
        return {"path": str(path), "sha256": digest_of_file(path), "size": path.stat().st_size}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _folder(folder: Path, split: str, subset: str | None) -> tuple[list[Path], list[str]]:
    """The files that hold a split, in an order that does not depend on the file system, and notes about the others."""
    saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).exists()]
    if saved and subset is not None:
        raise UserError(
            f"{folder}: `subset` applies only to data sets with several; this is one that was saved to disk"
        )
    if "dataset_dict.json" in saved:
        folder = folder / split
        if not folder.is_dir():
            known = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
            raise UserError(f"{folder.parent}: has no split {split!r}; it has {', '.join(known) or 'none'}")
    if (folder / "state.json").exists():
        return _saved_to_disk(folder), []
    splits = splits_of(folder, subset)
    files = splits.of(split)
    return files, [*splits.notes, *mixed(split, files)]


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
