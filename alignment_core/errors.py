"""The errors of the core, by their remedy, and whether a retry can help."""

from __future__ import annotations


class AlignmentError(Exception):
    """Base of every error that this project raises on purpose.

    ``exit_code`` is the exit code of the ``align`` command; ``retryable`` says whether tasks retry.
    """

    exit_code = 1
    retryable = False


class UserError(AlignmentError):
    """The user's input is wrong: a recipe, an argument, a reference. Never retried."""

    exit_code = 2


class DataError(UserError):
    """A row or file of the user's data is wrong. The message names the file and the line."""


class EnvironmentFault(AlignmentError):
    """The machine lacks something: a package, memory, a device, a port, a permission. Never retried."""

    exit_code = 3


class OutOfMemory(EnvironmentFault):
    """A micro-batch did not fit into memory. The stage begins again with half the tokens; the tasks never retry it."""


class GpuOccupied(OutOfMemory):
    """A micro-batch did not fit beside other processes, such as an engine, that hold more than half of the GPU's memory. The
    stage ends, because smaller ones would hardly help."""


class InfrastructureError(AlignmentError):
    """An actor, an engine or a store died or did not answer. The stage is restarted from its progress."""

    retryable = True


class Unavailable(InfrastructureError):
    """An outage of a service, such as the store or the Hub, which no row or recipe can have caused."""


class MemoryPressure(InfrastructureError):
    """An actor was killed because the machine ran out of memory, most of which other processes used.

    ``needed`` is the memory, in bytes, that this run used at that moment. The stage waits until it is free.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class DeadlineExceeded(InfrastructureError):
    """A wait exceeded its deadline; the message names the wait. The run host is ended and a new one retries."""


class PeerFailed(InfrastructureError):
    """The other side of a transfer failed or died; its own error, where it can be had, says more."""


class RestartsExhausted(InfrastructureError):
    """A stage failed after its maximum number of restarts inside one run host. Not retried."""

    retryable = False


class StillUnavailable(Unavailable, RestartsExhausted):
    """An outage that outlasted the restarts of a stage."""


class Stopped(AlignmentError):
    """The run was stopped on purpose: cancelled, interrupted, or because another stage failed."""


class NumericError(AlignmentError):
    """A numeric failure: a loss that is not finite or explodes, log-probabilities that disagree. Never retried."""


_SHOWN = 3


def one_line(error: Exception) -> str:
    """The text of an error on one line. Pydantic's errors, which have many lines and links to pages for programmers, become
    fields with their problems."""
    from pydantic import ValidationError  # the sandbox of reward functions has this module, and no package

    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    items = error.errors(include_url=False, include_context=False, include_input=False)
    mistakes = [": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"]))) for item in items]
    more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
    return " ".join("; ".join(mistakes[:_SHOWN]).split()) + more


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type: libraries append stacks and advice for programmers."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


MAKE_IT_AGAIN = "`align run` with the recipe that made it makes it again (`align lineage` tells which stage did)"
"""Advice where bytes are gone or damaged: a stage whose artifact is not whole runs again."""


class StoreError(AlignmentError):
    """The artifact store refused an operation; the message names the object and the reason."""


class Changed(StoreError):
    """A file changed while it was being stored."""


class NotFound(StoreError):
    """No such artifact, tag or blob in this store."""


class UnknownName(UserError, NotFound):
    """A name given by the user that does not exist in this store."""


class Corrupt(StoreError):
    """Bytes in the store do not have the digest in their manifest."""


class Conflict(StoreError):
    """Another writer moved the tag first."""
