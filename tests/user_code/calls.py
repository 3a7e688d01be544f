"""Calls of a user's function in a separate process."""

from __future__ import annotations

from collections.abc import Callable

from alignment_core.user_code.process import FunctionProcess

FIELD = "rl.rewards.0.function"
Write = Callable[[str, str], str]
"""See the fixture ``write``."""
SCALES = "from helper import VALUE\ndef f(x): return x * VALUE\n"
"""A file that imports the file beside it."""


def ask(name: str, *arguments: object) -> object:
    """The answer of the function to one call."""
    with FunctionProcess(name, 20.0, FIELD) as process:
        ((_, answer),) = process.answers([list(arguments)])
        return answer
