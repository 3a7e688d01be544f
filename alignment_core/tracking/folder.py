"""The folder of a run's trackers below ALIGN_HOME: the same one after a crash, another one after success."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment_core.canonical import digest_of
from alignment_core.home import align_home
from alignment_core.processes import lock
from alignment_core.recipes import BaseRecipe

COMPLETED = "completed"
LONGEST_NAME = 40


@contextmanager
def run_folder(recipe: BaseRecipe) -> Iterator[Path]:
    """The folder for a run of ``recipe``, whose name is the run's id for W&B; this process alone has it.

    It is the one that an earlier run of the same recipe left without success, or else a new one. Where a recipe runs and
    who watches it does not count. The name's end is random, because another machine may run the same recipe.
    """
    identity = digest_of(recipe.model_dump(mode="json", exclude={"resources", "retention", "tracking"}))
    prefix = f"{recipe.name[:LONGEST_NAME]}-{identity[:8]}-"
    parent = align_home() / "tracking"
    parent.mkdir(parents=True, exist_ok=True)
    interrupted = [path for path in sorted(parent.glob(f"{prefix}*")) if not (path / COMPLETED).exists()]
    with contextlib.ExitStack() as held:
        folder = next((path for path in interrupted if _hold(path, held)), None)
        if folder is None:
            folder = parent / (prefix + secrets.token_hex(4))
            folder.mkdir()
            _hold(folder, held)
        yield folder
        with contextlib.suppress(OSError):  # then the next run goes on with this folder, which is no harm
            (folder / COMPLETED).touch()


def _hold(folder: Path, held: contextlib.ExitStack) -> bool:
    """Whether no other living process has the folder; then this one has, until ``held`` is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    if not lock(descriptor):
        os.close(descriptor)
        return False
    held.callback(os.close, descriptor)
    return True
