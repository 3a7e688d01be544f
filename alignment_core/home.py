"""The one directory for what is local to this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


def align_home() -> Path:
    """The one directory for what is local to this machine: ``$ALIGN_HOME``, by default ``~/.alignment``.

    A new one is closed to others, because of the logs, recipes and databases in it. One that is there keeps its mode:
    others may read artifacts in it on purpose (``align doctor`` says so).
    """
    home = Path(os.environ.get("ALIGN_HOME") or "~/.alignment").expanduser().absolute()
    _create(home)
    return home


@cache
def _create(home: Path) -> None:
    with suppress(OSError):  # who cannot write there learns it when something has to be written
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
