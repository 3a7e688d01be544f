"""The errors of the core: each says who has to act, and whether a retry can help."""

from __future__ import annotations


class AlignmentError(Exception):
    """Base of every error that this project raises on purpose.

    ``exit_code`` is what the ``align`` command returns for it; ``retryable`` is what the tasks ask before a retry.
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


class InfrastructureError(AlignmentError):
    """Something died or did not answer: an actor, an engine, a store. The stage begins again from its progress."""

    retryable = True


class Unavailable(InfrastructureError):
    """A service does not answer: the store, the Hub. It is an outage, which no row or recipe can have caused."""


class MemoryPressure(InfrastructureError):
    """An actor was killed because the machine ran out of memory, most of which other processes used.

    ``needed`` is the memory, in bytes, that this run used at that moment. The stage waits until it is free.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class DeadlineExceeded(InfrastructureError):
    """A wait took longer than its deadline. The message says which wait; the run host is ended and a new one tries."""


class RestartsExhausted(InfrastructureError):
    """A stage began again as often as it may, inside one run host, and failed each time. Not tried any further."""

    retryable = False


class StillUnavailable(Unavailable, RestartsExhausted):
    """An outage that outlasted the restarts of a stage."""


class Stopped(AlignmentError):
    """The run was ended on purpose: cancelled, interrupted, or another stage failed."""


class NumericError(AlignmentError):
    """The mathematics went wrong: a loss that is not finite or explodes, log-probabilities that disagree. Never retried."""


_SHOWN = 3


def one_line(error: Exception) -> str:
    """The text of an error on one line. Of pydantic's, which has many lines and links to pages for programmers: each field,
    and what is wrong with it."""
    from pydantic import ValidationError  # the sandbox of reward functions has this module, and no package

    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    items = error.errors(include_url=False, include_context=False, include_input=False)
    mistakes = [": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"]))) for item in items]
    more = f"; and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
    return " ".join("; ".join(mistakes[:_SHOWN]).split()) + more


MAKE_IT_AGAIN = "`align run` with the recipe that made it makes it again (`align lineage` tells which stage did)"
"""What helps where bytes are gone or damaged: a stage whose artifact is not whole runs again."""


class StoreError(AlignmentError):
    """The artifact store refuses: the message says which object and why."""


class NotFound(StoreError):
    """No such artifact, tag or blob in this store."""


class UnknownName(UserError, NotFound):
    """A name that the user gave means nothing in this store."""


class Corrupt(StoreError):
    """Bytes in the store do not have the digest that their manifest says."""


class Conflict(StoreError):
    """Another writer moved the tag first."""
