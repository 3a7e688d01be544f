"""The events that a tracker of a run receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.curve import Line
from alignment_core.host.progress_log import Progress


class Listener:
    """A tracker of a run. ``label`` names a stage, such as ``round-1/dpo``; a stage that is retried starts again.

    Its methods are called one at a time, in the order of events. A cached stage finishes without having started. Events that a
    listener does not define are ignored.
    """

    def requested(self, call: StageCall, key: str) -> None:
        """A stage's inputs are known, so that it is looked up in the store under ``key``, and runs if it is not there. A stage
        that is retried is requested again."""

    def started(self, label: str) -> None:
        """A stage starts to run."""

    def progress(self, label: str, progress: Progress) -> None:
        """The progress of a stage."""

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        """A stage resumes from a checkpoint. ``lines`` are its whole curve up to there and replace later reports."""

    def waits(self, label: str, reason: str | None) -> None:
        """The reason why a started stage waits, in words; None when it continues."""

    def starts(self, label: str, component: str | None) -> None:
        """The component that starts for a stage, such as its run host or the engines; None once it is ready."""

    def warned(self, label: str, sentence: str) -> None:
        """A stage restarts after a crash: the process, the reason and the consequence."""

    def produced(self, result: StageResult) -> None:
        """The outputs of a requested stage are in the store, because it ran or because it was cached. Unlike ``finished`` this
        also comes if the run ends meanwhile."""

    def raised(self, label: str, error: BaseException) -> None:
        """A requested stage ends with an error and is not retried; Stopped if the run is being stopped."""

    def failed(self, label: str, sentence: str) -> None:
        """A stage failed; stages that do not need it continue."""

    def finished(self, result: StageResult) -> None:
        """A stage is done, or was cached."""

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Texts at the end of the run: prompts, and completions by policy."""

    def ended(self, completed: bool) -> None:
        """The run is over; this is the last event."""


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics that are single numbers, by name."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
