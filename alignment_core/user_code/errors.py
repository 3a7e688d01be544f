"""A call of the user's code without a result: a typed reason, and the error and its line in one sentence."""

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
    """One completion has no reward; the message is the reason, to follow the name of the function."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[type[Failed], tuple[Reason, str]]:
        return Failed, (self.reason, str(self))


def raised(error: BaseException) -> str:
    """An error of the user's code, without secrets, with the innermost line of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(frame.filename.startswith(folder) for folder in NOT_THE_USERS)]
    location = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {cut(str(error))}{location}"


def does_not_take(error: BaseException, *callers: str) -> bool:
    """Whether a function does not accept the arguments of one of our ``callers``, so that none of it ran."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].name in callers and frames[-1].filename.startswith(NOT_THE_USERS[0])
    return isinstance(error, TypeError) and ours


NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Prefixes of files whose lines do not help the user: this package, Python and installed packages."""
