"""What happens when an attempt at a stage fails: it restarts from its progress, a bounded number of times, or gives up."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from alignment_core.artifacts.faults import machine_fault
from alignment_core.errors import (
    AlignmentError,
    DeadlineExceeded,
    InfrastructureError,
    OutOfMemory,
    RestartsExhausted,
    StillUnavailable,
    Stopped,
    Unavailable,
)
from alignment_core.recipes import ResourcesConfig

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
LEAST_TOKENS = 16
"""The smallest micro-batch that ``ResourcesConfig`` takes."""

T = TypeVar("T")


def with_restarts(
    label: str,
    resources: ResourcesConfig,
    stopping: threading.Event,
    attempt: Callable[[ResourcesConfig, dict[str, float]], T],
) -> T:
    """The result of ``attempt``, a call with the resources to use and what the record's cost says of earlier attempts.

    After an InfrastructureError it is made again, ``actor_restarts`` times at most (then RestartsExhausted). After
    OutOfMemory it is made again with half of ``max_tokens_per_microbatch``: how a batch is cut changes a result by
    rounding alone. A DeadlineExceeded is final here, because what hangs once holds processes that must go first; so is
    everything once ``stopping`` is set.
    """
    restarts, given = 0, resources.max_tokens_per_microbatch
    while True:
        budget = resources.max_tokens_per_microbatch
        cost = {"restarts": restarts, "tokens_per_microbatch": budget if budget < given else 0}
        try:
            return attempt(resources, {name: float(value) for name, value in cost.items() if value})
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{label}: {error}") from error
        except InfrastructureError as error:
            if restarts == resources.actor_restarts:
                kind = StillUnavailable if isinstance(error, Unavailable) else RestartsExhausted
                raise kind(
                    f"{label}: {error} (failed {restarts + 1} times; resources.actor_restarts allows {restarts} restarts)"
                ) from error
            restarts += 1
            log.warning("%s: %s; restart %d of %d", label, error, restarts, resources.actor_restarts)
            if stopping.wait(_pause(restarts)):
                raise Stopped(f"{label}: stopped before it restarted") from error
        except OutOfMemory as error:
            if budget // 2 < LEAST_TOKENS:
                raise OutOfMemory(
                    f"{label}: {error}, and no smaller size is left to try; lower the data's max_length, set "
                    "resources.gradient_checkpointing or resources.zero_stage: 3, or use devices with more memory"
                ) from error
            resources = resources.model_copy(update={"max_tokens_per_microbatch": budget // 2})
            log.warning("%s: %s; retrying with resources.max_tokens_per_microbatch %d", label, error, budget // 2)
        except AlignmentError:
            raise
        except Exception as error:
            fault = machine_fault(error)
            if fault is None:
                raise
            raise fault from error


def _pause(restarts: int) -> float:
    """Seconds: exponential backoff with jitter, because what killed one actor may take a while to pass."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (restarts - 1))
    return longest * (0.5 + random.random() / 2)
