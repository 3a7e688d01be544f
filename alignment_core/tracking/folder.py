"""The folder of a run's trackers below ALIGN_HOME: the same after a crash, a new one after success."""

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
    """The folder for a run of ``recipe``, locked by this process. Its name is the run's id for W&B.

    A folder that an earlier run of the same recipe left without success is reused. Placement and trackers of a recipe do not
    distinguish runs. The end of the name is random, because another machine may run the same recipe.
    """
    identity = digest_of(recipe.model_dump(mode="json", exclude={"resources", "retention", "tracking"}))
    prefix = f"{recipe.name[:LONGEST_NAME]}-{identity[:8]}-"
    parent = align_home() / "tracking"
    parent.mkdir(parents=True, exist_ok=True)
    interrupted = [path for path in sorted(parent.glob(f"{prefix}*")) if not (path / COMPLETED).exists()]
    with contextlib.ExitStack() as stack:
        folder = next((path for path in interrupted if _lock(path, stack)), None)
        if folder is None:
            folder = parent / (prefix + secrets.token_hex(4))
            folder.mkdir()
            _lock(folder, stack)
        yield folder
        with contextlib.suppress(OSError):  # the next run then continues in this folder, which is harmless
            (folder / COMPLETED).touch()


def _lock(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock the folder until ``stack`` is closed; False if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    if not lock(descriptor):
        os.close(descriptor)
        return False
    stack.callback(os.close, descriptor)
    return True
