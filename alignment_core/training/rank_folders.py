"""Folders of a stage that its trainer ranks read and write, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from alignment_core.artifacts import portable_paths
from alignment_core.artifacts.portable_paths import home_id, is_artifact
from alignment_core.cluster.group import ActorGroup

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def bring(ranks: ActorGroup[Any], folder: Path) -> None:
    """Copy a folder of this machine to those of all ranks. Artifacts are fetched there by themselves."""
    if not ranks.elsewhere or is_artifact(folder):
        return
    entries = portable_paths.share(folder)
    ranks.run_on(ranks.elsewhere, portable_paths.clear, folder, home_id())  # of files of a save that was killed
    ranks.run_on(ranks.elsewhere, portable_paths.receive, folder, entries, home_id())


def write(
    ranks: ActorGroup[T],
    folders: Sequence[Path],
    method: Callable[Concatenate[T, P], R],
    /,
    *arguments: P.args,
    **named: P.kwargs,
) -> list[R]:
    """Call the method, which writes into these folders, on every rank; files of ranks on other machines are copied here."""
    for folder in folders:
        ranks.run_on(ranks.elsewhere, portable_paths.clear, folder, home_id())
    results = ranks.all(method, *arguments, **named)
    for folder in folders:
        for sent in ranks.run_on(ranks.elsewhere, portable_paths.send, folder, home_id()):
            portable_paths.receive(folder, sent or ())
    return results
