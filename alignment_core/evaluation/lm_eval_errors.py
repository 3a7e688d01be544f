"""Errors of lm-eval's process: their kinds among the project's own, and their way to the stage that started it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

from alignment_core import errors
from alignment_core.artifacts.os_errors import machine_fault
from alignment_core.errors import (
    AlignmentError,
    EnvironmentFault,
    InfrastructureError,
    Unavailable,
    UserError,
    first_line,
)
from alignment_core.memory import out_of_memory

FIELD = "evaluation.lm_eval"
UNREACHABLE = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "URLError"}
"""Names of the classes of errors about a server that does not answer. Python and each library for HTTP have their own."""
OFFLINE = "OfflineModeIsEnabled"
"""Name of the error where the user's settings forbid requests to the Hub."""


def describe(error: Exception, batch_size: int, path: Path) -> None:
    """Write the error that ends the process to a file, for :func:`ended`."""
    known = explained(error, batch_size)
    path.write_text(json.dumps([type(known).__name__, str(known)]))


def explained(error: Exception, batch_size: int) -> AlignmentError:
    """An error of lm-eval or of a library that it uses as one of ours, by its remedy."""
    if isinstance(error, AlignmentError):
        return error
    if out_of_memory(error):
        return EnvironmentFault(
            f"memory ran out with batches of {batch_size} sequences: lower {FIELD}.batch_size ({first_line(error)})"
        )
    if (fault := machine_fault(error)) is not None:
        return fault
    causes = list(_causes(error))
    if any(OFFLINE in _classes(cause) for cause in causes):
        return EnvironmentFault(
            "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, and the Hub's cache lacks what the tasks need: unset it "
            f"({first_line(error)})"
        )
    if any(map(_is_outage, causes)):
        return Unavailable(f"the Hub or another server of lm-eval's tasks is unavailable: {first_line(error)}")
    return UserError(f"lm-eval failed: {type(error).__name__}: {first_line(error)}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _classes(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _is_outage(error: BaseException) -> bool:
    """Whether a server did not answer, or answered that it has too many requests or an error of its own."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    return not UNREACHABLE.isdisjoint(_classes(error))


def ended(code: int, described: Path, log: Path) -> AlignmentError:
    """The error of a process that ended with an exit code other than 0: the one that it described, or how it ended."""
    if code > 0 and described.is_file():
        kind, message = json.loads(described.read_text())
        known: type[AlignmentError] = getattr(errors, kind, AlignmentError)
        return known(f"{FIELD}: {message} (its log: {log})")
    if code > 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        reason = ": ".join([f"ended with exit code {code}", *last])
    elif -code == signal.SIGKILL:
        reason = "was killed by SIGKILL, probably by the kernel because memory ran out"
    else:
        reason = f"was killed by {signal.Signals(-code).name}"
    return InfrastructureError(f"{FIELD}: lm-eval's process {reason} (its log: {log})")
