"""A night's attempt at its rows: the ledger records how it ends, and whether the rows may have caused it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from alignment_core.errors import (
    AlignmentError,
    DataError,
    EnvironmentFault,
    MemoryPressure,
    OutOfMemory,
    Stopped,
    StoreError,
    Unavailable,
    UserError,
)
from alignment_core.nights.ledger import MAX_FAILED_ATTEMPTS, AlreadyRuns, Claim, Ledger, Night, given_up_entry

log = logging.getLogger(__name__)


class Attempt:
    """One attempt of a night. ``night`` is its latest entry in the ledger."""

    def __init__(self, ledger: Ledger, night: Night) -> None:
        self.ledger = ledger
        self.night = night
        self.claim = Claim(night)

    def end(self, ended: Night) -> Night:
        """Record the outcome of a night whose stages are complete.

        Where an earlier attempt at the same rows was taken for dead and still promoted its policy, the rows are used.
        """
        if ended.state == "conflict" and self.ledger.has_in_production(ended.batch):
            reasons = ("production was trained on these rows already",)
            ended = ended.model_copy(update={"state": "promoted", "reasons": reasons})
        self.night = self.ledger.record(ended)
        return self.night

    def stop(self, reason: str) -> None:
        """Record that the night ends before it is complete for a reason that is not in its rows: a later one takes them."""
        if self.night.state == "claimed" and self.night.batch:
            self.night = self.ledger.record(self.night.model_copy(update={"state": "stopped", "reasons": (reason,)}))

    def fail(self, error: Exception) -> None:
        """Record a failure, which counts if the rows may have caused it."""
        counts = may_be_caused_by_rows(error) and self.ledger.was_working_on_rows(
            self.night, unknown=not self.night.run
        )
        failed = self.night.failed_attempts + bool(self.night.batch and counts)
        reasons = (f"{type(error).__name__}: {error}",)
        entry = self.night.model_copy(update={"state": "failed", "failed_attempts": failed, "reasons": reasons})
        self.night = self.ledger.record(given_up_entry(entry) if failed >= MAX_FAILED_ATTEMPTS else entry)


@contextmanager
def attempt(ledger: Ledger, night: Night, announce: Callable[[Night], None]) -> Iterator[Attempt]:
    """Claim rows for a night and hold them; record and announce how the attempt ends. Raises what ended it.

    An outcome that the store does not take is in the log: the rows are still the next night's.
    """
    current = Attempt(ledger, night)
    try:
        with ledger.claim(night.night, night.run) as current.claim:
            current.night = current.claim.night
            for entry in current.claim.given_up:
                announce(entry)
            try:
                yield current
            except BaseException as error:
                _record_end(current, error, announce)
                raise
    except AlreadyRuns:
        raise
    except BaseException as error:
        if current.night is night:
            _record_end_of_claim(current, error, announce)
        raise
    if current.night.state != "stopped":
        announce(current.night)


_ENDS = {
    "TerminationSignal": "terminated by SIGTERM",
    "KeyboardInterrupt": "interrupted",
    "SystemExit": "ended by a signal",
}
"""Sentences for exceptions without one, by class: Prefect's for SIGTERM, which this package does not import, and Python's."""


def _record_end(current: Attempt, error: BaseException, announce: Callable[[Night], None]) -> None:
    if current.night.state != "claimed":
        return  # its outcome is already recorded
    try:
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            current.fail(error)
            announce(current.night)
        else:
            current.stop(_ENDS.get(type(error).__name__) or str(error) or type(error).__name__)
    except Exception as problem:
        log.warning("the outcome of night %s could not be recorded: %s", current.night.night, problem)


def _record_end_of_claim(current: Attempt, error: BaseException, announce: Callable[[Night], None]) -> None:
    """As above, where the claim itself was interrupted: its entry may be in the ledger already."""
    with suppress(Exception):  # the store may be away
        claimed = [
            entry
            for entry in current.ledger.batches()
            if (entry.night, entry.run) == (current.night.night, current.night.run)
        ]
        current.night = next((entry for entry in claimed if entry.state == "claimed"), current.night)
    _record_end(current, error, announce)


def may_be_caused_by_rows(error: Exception) -> bool:
    """Whether the rows of a night may be why its stages failed.

    Stages fail with the project's own errors. What else ends a run happens outside them, such as an outage of the Prefect API
    or its database; outages, what the machine lacks, and a wrong recipe or file are not in the rows either.
    """
    if isinstance(error, (DataError, OutOfMemory)):
        return True
    elsewhere = (Stopped, Unavailable, MemoryPressure, StoreError, EnvironmentFault, UserError, AlreadyRuns)
    return isinstance(error, AlignmentError) and not isinstance(error, elsewhere)
