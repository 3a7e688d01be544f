"""What a process that we start may know of our environment: all but Prefect's variables.

They may hold a token or the password of a database, and below us runs anybody's code: reward functions, tokenizers, stages.
Prefect's own processes, and the flows that its workers start, are told more: see :mod:`flows.access`.
"""

from __future__ import annotations

import os

PREFIX = "PREFECT_"


def inherited(**changes: str) -> dict[str, str]:
    """The environment of a process below this one, with changes."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}, **changes}
