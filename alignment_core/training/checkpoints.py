"""Checkpoints of a running stage: which ones are valid, and what must be on disk before they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

CURVE = "metrics.jsonl"
"""The metrics of the steps up to a checkpoint, in its folder."""


def complete(checkpoint: Path, described: dict[str, Any]) -> None:
    """Force all of a checkpoint to the disk, then say in its ``complete.json`` that it counts, and what it is."""
    _sync_tree(checkpoint)
    (checkpoint / "complete.json").write_text(json.dumps(described))
    _sync_tree(checkpoint)
    _sync(checkpoint.parent)  # its own name there


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, in the place of an earlier one: the name stands for all of it, or is not there."""
    _sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _sync(folder.parent)


def link_tree(folder: Path, target: Path) -> None:
    """Give the files of a folder second names below another one; where the file system has no such links, copy them."""

    def link(source: str, name: str) -> None:
        try:
            os.link(source, name)
        except OSError:
            shutil.copyfile(source, name)

    shutil.copytree(folder, target, copy_function=link, dirs_exist_ok=True)


def described(checkpoint: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself: its ``step``, its ``layout``, and what the driver of the job wants back."""
    return dict(json.loads((checkpoint / "complete.json").read_text()))


def curve_of(directory: Path, step: int) -> bytes:
    """The metrics of the steps up to the checkpoint of ``step``; empty where none were reported by then."""
    try:
        return (folder_of(directory, step) / CURVE).read_bytes()
    except FileNotFoundError:
        return b""


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def drop_incomplete(directory: Path) -> None:
    """Remove what a killed or failed save left: it counts for nothing and takes the room of the next one."""
    for checkpoint in directory.glob("step-*"):
        if not (checkpoint / "complete.json").is_file():
            shutil.rmtree(checkpoint, ignore_errors=True)


def drop_older(directory: Path, step: int) -> None:
    """Remove the checkpoints of other steps than this one, which is complete."""
    for older in directory.glob("step-*"):
        if older != folder_of(directory, step):
            (older / "complete.json").unlink(missing_ok=True)  # first: what is half gone must not count
            shutil.rmtree(older, ignore_errors=True)


def newest_progress(directory: Path, layout: dict[str, Any] | None = None) -> Path | None:
    """The newest complete checkpoint in ``directory`` (of this layout, if one is given)."""
    for checkpoint in sorted(directory.glob("step-*"), reverse=True):
        try:
            found = described(checkpoint)
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if layout is None or found["layout"] == layout:
            return checkpoint
    return None


def _sync_tree(directory: Path) -> None:
    """Force the files below ``directory`` to the disk, then the folder entries."""
    for path in [*sorted(directory.rglob("*"), reverse=True), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    """Force one file, or the entries of one folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
