"""Verifiers that recipes know by name: the plug-in ``VERIFIER`` of their module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from alignment_core.rewards.results import Answers

Rows = Sequence[dict[str, Any]]


class Opened(Protocol):
    """A verifier that runs in this process, or keeps its own."""

    def __call__(self, rows: Rows) -> Answers:
        """The number of each row and its score in [0, 1], in any order."""

    def close(self) -> None:
        """End the started processes. Call it from any thread."""


def _nothing() -> None:
    """Always there."""


@dataclass(frozen=True)
class NamedVerifier:
    """Give exactly one of ``function`` and ``open``."""

    function: str | None = None
    """``module:function`` of prompt, completion and label; called as users' functions are, in processes of their own."""
    open: Callable[[str], Opened] | None = None
    """Takes the field that names the verifier. Raises EnvironmentFault for what this machine lacks."""
    packages: tuple[str, ...] = ()
    """Distributions that decide its scores: their versions are in the stage's key."""
    runs_python: bool = False
    """Whether it runs completions in this Python, whose version then decides its scores."""
    check: Callable[[], object] = _nothing
    """Raises UserError if it cannot be used, as without a package."""
    tasks_only: bool = False
    """Whether it scores completions of the built-in tasks alone."""
