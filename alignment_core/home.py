"""``ALIGN_HOME``: the directory of files that are local to this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


def align_home() -> Path:
    """The directory of files that are local to this machine: ``$ALIGN_HOME``, by default ``~/.alignment``.

    A new one is closed to other users, because of the logs, recipes and databases in it. An existing one keeps its mode:
    others may be meant to read artifacts in it (``align doctor`` reports it).
    """
    home = Path(os.environ.get("ALIGN_HOME") or "~/.alignment").expanduser().absolute()
    _create(home)
    return home


@cache
def _create(home: Path) -> None:
    with suppress(OSError):  # reported when something has to be written
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
