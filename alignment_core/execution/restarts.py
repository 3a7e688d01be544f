"""Restarts of a stage whose attempt failed: from its progress, a bounded number of times."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

from alignment_core.artifacts.os_errors import machine_fault
from alignment_core.errors import (
    AlignmentError,
    DeadlineExceeded,
    EnvironmentFault,
    GpuOccupied,
    InfrastructureError,
    MemoryPressure,
    OutOfMemory,
    RestartsExhausted,
    StillUnavailable,
    Stopped,
    Unavailable,
)
from alignment_core.machine_memory import gib, machine_memory, used_by
from alignment_core.recipes import ResourcesConfig

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
LEAST_TOKENS = 16
"""The smallest micro-batch that ``ResourcesConfig`` allows."""
MOST_MEMORY_KILLS = 20
"""Kills for memory that other processes used, beyond which a further one counts as a restart."""
MEMORY_MARGIN = 256 << 20
"""Free bytes required beyond the memory that the run used when an actor was killed."""
MEMORY_CHECK_SECONDS = 2.0

T = TypeVar("T")


def with_restarts(
    label: str,
    resources: ResourcesConfig,
    stopping: threading.Event,
    attempt: Callable[[ResourcesConfig, dict[str, float]], T],
    warn: Callable[[str], None] = lambda _: None,
    waits: Callable[[str | None], None] = lambda _: None,
) -> T:
    """The result of ``attempt``, which is called with the resources to use and the cost entries of earlier attempts.

    After an InfrastructureError it is called again, at most ``actor_restarts`` times (then RestartsExhausted). After
    MemoryPressure it is called again once the memory is free, which does not count as a restart. After OutOfMemory it is called
    again with half of ``max_tokens_per_microbatch``: how a batch is cut changes a result only by rounding. GpuOccupied is
    final, and so is a DeadlineExceeded, because a call that hangs may hold processes that must end first; so is every error
    once ``stopping`` is set.
    ``warn`` is called with a sentence for each new attempt, ``waits`` with the reason of a wait (None when it ends).
    """
    restarts = 0
    kills = 0
    given = resources.token_budget

    def report(sentence: str) -> None:
        log.warning("%s: %s", label, sentence)
        warn(sentence)

    while True:
        budget = resources.token_budget
        cost = {"restarts": restarts, "memory_kills": kills, "tokens_per_microbatch": budget if budget < given else 0}
        try:
            return attempt(resources, {name: float(value) for name, value in cost.items() if value})
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{label}: {error}") from error
        except InfrastructureError as error:
            if isinstance(error, MemoryPressure) and kills < MOST_MEMORY_KILLS:
                kills += 1
                report(
                    f"{error}; it restarts once {gib(error.needed)} are free, which does not count as one of its "
                    f"{resources.actor_restarts} restarts"
                )
                if stopping.wait(_pause(kills)):
                    raise Stopped(f"{label}: stopped before it restarted") from error
                _wait_for_memory(label, error.needed, resources.wait_timeout_seconds, stopping, waits)
                continue
            if restarts == resources.actor_restarts:
                kind = StillUnavailable if isinstance(error, Unavailable) else RestartsExhausted
                raise kind(
                    f"{label}: {error} (failed {restarts + 1} times; resources.actor_restarts allows {restarts} restarts)"
                ) from error
            restarts += 1
            report(f"{error}; restart {restarts} of {resources.actor_restarts}")
            if stopping.wait(_pause(restarts)):
                raise Stopped(f"{label}: stopped before it restarted") from error
        except OutOfMemory as error:
            if stopping.is_set():
                raise Stopped(f"{label}: stopped, and {error}") from error
            if isinstance(error, GpuOccupied):
                raise GpuOccupied(
                    f"{label}: {error}; lower resources.gpu_memory_utilization, set resources.placement: disaggregated, or end "
                    "the other processes"
                ) from error
            if budget // 2 < LEAST_TOKENS:
                raise OutOfMemory(
                    f"{label}: {error}, and no smaller size is left to try; {_less_memory(resources)}"
                ) from error
            resources = resources.model_copy(update={"max_tokens_per_microbatch": budget // 2})
            report(f"{error}; retrying with resources.max_tokens_per_microbatch {budget // 2}")
        except AlignmentError:
            raise
        except Exception as error:
            fault = machine_fault(error)
            if fault is None:
                raise
            raise fault from error


def _less_memory(resources: ResourcesConfig) -> str:
    """What lets the smallest micro-batch fit, without settings that these resources have."""
    shares_layers = resources.trainer_tensor_parallel_size > 1
    unset = {
        "resources.gradient_checkpointing": resources.gradient_checkpointing is not True,
        "resources.zero_stage: 3": resources.zero_stage != 3 and not shares_layers,
        "resources.sequence_parallel_size": resources.sequence_parallel_size == 1 and not shares_layers,
        "a larger resources.trainer_tensor_parallel_size": shares_layers,
    }
    settings = " or ".join(name for name, helps in unset.items() if helps)
    return ", ".join(
        ["lower the data's max_length", *([f"set {settings}"] if settings else []), "or use devices with more memory"]
    )


def _wait_for_memory(
    label: str, needed: int, seconds: float, stopping: threading.Event, waits: Callable[[str | None], None]
) -> None:
    """Wait until this run may use ``needed`` bytes again. Raises EnvironmentFault after ``seconds``, and Stopped."""
    deadline = time.monotonic() + seconds
    waiting = False
    while (missing := needed + MEMORY_MARGIN - used_by(psutil.Process()) - machine_memory().free) > 0:
        if not waiting:
            waiting = True
            waits(f"{gib(needed)} of memory: {gib(missing)} more must be free, which other processes use")
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"{label}: {gib(missing)} of the {gib(needed)} of memory that it needs were not free after {seconds:g} seconds "
                "(resources.wait_timeout_seconds), because other processes use them: end those, then `align resume`"
            )
        if stopping.wait(MEMORY_CHECK_SECONDS):
            raise Stopped(f"{label}: stopped while it waited for memory")
    if waiting:
        waits(None)


def _pause(restarts: int) -> float:
    """Seconds: exponential backoff, because the cause may take a while to pass, with jitter, so that runs do not retry
    together."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (restarts - 1))
    return longest * (0.5 + random.random() / 2)
