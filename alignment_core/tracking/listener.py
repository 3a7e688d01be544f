"""The events that a tracker of a run receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment_core.execution.base import StageResult
from alignment_core.execution.curve import Line
from alignment_core.host.progress_log import Progress


class Listener:
    """A tracker of a run. ``label`` names a stage, as ``round-1/dpo`` does; a stage that is retried starts again.

    Its methods are called one at a time, in the order of events. A cached stage finishes without having started. Events that a
    listener does not define are ignored.
    """

    def started(self, label: str) -> None:
        """A stage runs."""

    def progress(self, label: str, progress: Progress) -> None:
        """How far it is."""

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        """It is resumed from a checkpoint, and ``lines`` are its whole curve up to there. What was reported after that
        no longer counts."""

    def waits(self, label: str, reason: str | None) -> None:
        """What a started stage waits for, in words; None when it goes on."""

    def starts(self, label: str, what: str | None) -> None:
        """What is being started for a started stage, such as its run host or the engines; None once it is there."""

    def warned(self, label: str, sentence: str) -> None:
        """It restarts after something died: what, why, and what follows."""

    def failed(self, label: str, sentence: str) -> None:
        """It failed, and stages that do not need it continue."""

    def finished(self, result: StageResult) -> None:
        """It is done, or was cached."""

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Texts to look at at the end of the run: prompts, and completions by what gave them."""

    def ended(self, completed: bool) -> None:
        """The run is over: nothing comes after this."""


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics that are single numbers, by name."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
