"""A call of the user's code that returned no result: a typed reason, and what it raised and where, in one line."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Literal

from alignment_core.credentials import cut

Reason = Literal[
    "raised", "timeout", "crashed", "wrong_shape", "bad_number", "unreachable", "refused", "none_given", "too_long"
]


class Failed(Exception):
    """One completion has no reward; the message says why, after the name of what should have given it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[type[Failed], tuple[Reason, str]]:
        return Failed, (self.reason, str(self))


def raised(error: BaseException) -> str:
    """What the user's code raised, without secrets, and the last of its own lines that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(frame.filename.startswith(folder) for folder in NOT_THE_USERS)]
    location = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {cut(str(error))}{location}"


def does_not_take(error: BaseException, *callers: str) -> bool:
    """Whether a function does not take the arguments that one of our ``callers`` gave it, so that nothing of it ran."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].name in callers and frames[-1].filename.startswith(NOT_THE_USERS[0])
    return isinstance(error, TypeError) and ours


NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Where files begin whose lines say nothing to the user: this package, Python and installed packages."""
