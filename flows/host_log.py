"""Forward the output of the run host and its actors to the log of the Prefect run."""

from __future__ import annotations

import logging
import re
from typing import Any

from alignment_core.credentials import cut
from alignment_core.host.logs import OnLines

_ERROR = re.compile(
    r"Traceback \(most recent call last\)|\b(ERROR|CRITICAL|FATAL)\b|\w(Error|Exception)\b|Fatal Python error"
)
_WARNING = re.compile(r"\bWARN(ING)?\b|\w*Warning\b|(?m:^\[?W\d{4} )")


def in_run_log(logger: Any) -> OnLines:
    """A listener for :meth:`Host.follow`. ``logger`` is the run's: another thread uses it, outside the run's context."""

    def on_lines(stage: str | None, origin: str, text: str) -> None:
        logger.log(level(text), "%s%s: %s", f"{stage} " if stage else "", origin, cut(text))

    return on_lines


def level(text: str) -> int:
    """The level of these lines, guessed from their words: libraries have no common format."""
    if _ERROR.search(text):
        return logging.ERROR
    return logging.WARNING if _WARNING.search(text) else logging.INFO
