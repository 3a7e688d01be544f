"""The result of each part, and the report of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["passed", "failed", "could not run"]
PASSED: State = "passed"
FAILED: State = "failed"
NOT_RUN: State = "could not run"


class CannotRun(Exception):
    """Something that a part needs is not there; the text says what."""


@dataclass(frozen=True)
class Result:
    """The result of one part."""

    part: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or could not run."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers and names by what they are of, with the unit at its end."""


def failed(results: Sequence[Result]) -> bool:
    """Whether a part failed, or none passed: then nothing is known to work."""
    states = [result.state for result in results]
    return FAILED in states or PASSED not in states


def text(results: Sequence[Result]) -> str:
    """A line for each part and each of its figures, and one of counts."""
    lines = []
    for result in results:
        lines.append(f"{result.state:<13} {result.part:<10} {result.seconds:6.1f} s  {result.reason}".rstrip())
        lines += [f"{'':26}{name}: {_shown(value)}" for name, value in result.figures.items()]
    counts = {state: sum(result.state == state for result in results) for state in (PASSED, FAILED, NOT_RUN)}
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The same as plain data."""
    return {"failed": failed(results), "parts": [asdict(result) for result in results]}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
