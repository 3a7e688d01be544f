"""Checkpoints of a running stage, and the order of writes that makes them complete or absent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.files import link_or_copy, sync

if TYPE_CHECKING:
    from alignment_core.models.model_ref import Model

CURVE = "metrics.jsonl"
"""File with the metrics of the steps up to a checkpoint, in its folder."""


def complete(checkpoint: Path, described: dict[str, Any]) -> None:
    """Sync all of a checkpoint to the disk, and only then write ``complete.json``, without which it does not count."""
    _sync_tree(checkpoint)
    (checkpoint / "complete.json").write_text(json.dumps(described))
    _sync_tree(checkpoint)
    sync(checkpoint.parent)  # the entry of its own name


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, in place of an earlier one. A folder of this name is complete at all times."""
    _sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def link_tree(folder: Path, target: Path) -> None:
    """Hard-link the files of a folder into another one, or copy them if the file system has no hard links."""
    shutil.copytree(folder, target, copy_function=link_or_copy, dirs_exist_ok=True)


def link_model(folder: Path, target: Path, trained: Model) -> None:
    """Link the files of a model that was kept during the training of ``trained``, whose code it has. On another machine the
    kept folder has none: code is not read from progress in a store."""
    link_tree(folder, target)
    for code in trained.path.glob("*.py") if trained.trust_remote_code else ():
        if not (target / code.name).exists():
            shutil.copyfile(code, target / code.name)


def described(checkpoint: Path) -> dict[str, Any]:
    """The description of a complete checkpoint: its ``step``, its ``layout``, and entries of the job."""
    return dict(json.loads((checkpoint / "complete.json").read_text()))


def curve_of(directory: Path, step: int) -> bytes:
    """The metrics of the steps up to the checkpoint of ``step``; empty if there were none."""
    try:
        return (folder_of(directory, step) / CURVE).read_bytes()
    except FileNotFoundError:
        return b""


def folder_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def drop_incomplete(directory: Path) -> None:
    """Remove the files of killed or failed saves, which take the space of the next checkpoint."""
    for checkpoint in directory.glob("step-*"):
        if not (checkpoint / "complete.json").is_file():
            shutil.rmtree(checkpoint, ignore_errors=True)


def drop_older(directory: Path, step: int) -> None:
    """Remove the checkpoints of all steps other than ``step``, whose checkpoint is complete."""
    for older in directory.glob("step-*"):
        if older != folder_of(directory, step):
            (older / "complete.json").unlink(missing_ok=True)  # first, so that a half-deleted checkpoint does not count
            shutil.rmtree(older, ignore_errors=True)


def newest_progress(directory: Path, layout: dict[str, Any] | None = None) -> Path | None:
    """The newest complete checkpoint in ``directory`` (of this layout, if one is given)."""
    for checkpoint in sorted(directory.glob("step-*"), reverse=True):
        try:
            description = described(checkpoint)
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if layout is None or description["layout"] == layout:
            return checkpoint
    return None


def _sync_tree(directory: Path) -> None:
    """Sync the files below ``directory`` to the disk, then the folder entries."""
    for path in [*sorted(directory.rglob("*"), reverse=True), directory]:
        sync(path)
