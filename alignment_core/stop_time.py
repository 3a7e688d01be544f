"""How long a run may take to save its progress when it is stopped: the recipe's ``stop_seconds``, or longer if saving does.

The run host notes in files how long saving took, for the processes that stop it: the supervisors above it, which it finds in a
variable of its environment, and every reader of the run's journal. The supervisor imports this module: keep it small.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SUPERVISORS = "ALIGN_SUPERVISORS"
"""Variable of the environment with the folders of all supervisors of a process, the outermost first."""
SAVES = 3.0
"""Time to stop, in times of the last save: the step under way ends first, and the disk may be slower than it was."""
_FILE = "stop-seconds"


def supervisors() -> list[Path]:
    """The folders of the supervisors of this process."""
    return [Path(folder) for folder in os.environ.get(SUPERVISORS, "").split(os.pathsep) if folder]


def note(folder: Path, seconds: float) -> None:
    """Note that what the processes of ``folder`` save takes ``seconds``. The longest time counts. No run fails because of a
    full disk or a missing folder."""
    needed = SAVES * seconds
    if needed > _noted(folder):
        partial = folder / f"{_FILE}.{os.getpid()}.partial"
        with suppress(OSError):
            partial.write_text(f"{needed:.3f}")
            os.replace(partial, folder / _FILE)


def extended(seconds: float, folder: Path) -> float:
    """The time to stop ``seconds``, or the one noted in ``folder`` if it is longer. 0 stays 0: end at once."""
    return max(seconds, _noted(folder)) if seconds else 0.0


def _noted(folder: Path) -> float:
    with suppress(OSError, ValueError):
        return float((folder / _FILE).read_text())
    return 0.0
