"""Buckets as Ray objects, which the sender's process hands to the engines' actors: slow, and for any nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from alignment_core.cluster.actor import Call
from alignment_core.errors import AlignmentError, DeadlineExceeded, PeerFailed, first_line
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.channels.deltas import DeltaEncoder

if TYPE_CHECKING:
    from torch import Tensor

IN_STORE = 2
"""Buckets at a time: one is made while the other is received."""


class RaySender:
    """Sends all weights to the engines, which prepare for an update before, and are not in another call meanwhile."""

    def __init__(
        self,
        actors: Sequence[Any],
        method: str,
        seconds: float,
        begin_delta: Call[Any, list[str | None]] | None = None,
    ) -> None:
        """``method`` of the object of each of these actors takes a bucket; ``seconds`` is the deadline of each call. With
        ``begin_delta`` updates are deltas (:mod:`~.deltas`): it begins one, and returns the versions of the workers."""
        self.actors = actors
        self.method = method
        self.seconds = seconds
        self.begin_delta = begin_delta
        self._encoder = None if begin_delta is None else DeltaEncoder()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send these weights; returns once all engines have loaded them.

        Raises an engine's own error, RuntimeError for one that is not of this project, PeerFailed for a dead engine,
        and DeadlineExceeded.
        """
        import ray

        if self.begin_delta is not None and self._encoder is not None:
            begun = [actor.call.remote(self.begin_delta) for actor in self.actors]
            versions = self._wait(begun, self.begin_delta.method)
            weights = self._encoder.encode(weights, list(chain.from_iterable(versions)))
        pending: list[list[Any]] = []
        for bucket in to_buckets(weights):
            if len(pending) == IN_STORE:
                self._wait(pending.pop(0), self.method)
            payload = ray.put(bucket)  # travels once to each node
            pending.append([actor.call_with.remote(self.method, payload) for actor in self.actors])
        for calls in pending:
            self._wait(calls, self.method)

    def _wait(self, calls: list[Any], method: str) -> list[Any]:
        """Results of calls of this method."""
        import ray

        try:
            return list(ray.get(calls, timeout=self.seconds))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AlignmentError):
                raise error.cause from error
            raise RuntimeError(f"engines: `{method}` failed: {error.cause!r}") from None
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"engines did not answer `{method}` within {self.seconds:g} seconds (resources.wait_timeout_seconds)"
            ) from error
        except ray.exceptions.RayError as error:
            raise PeerFailed(f"an engine died in a weight update: {first_line(error)}") from error

    def close(self) -> None:
        """Does nothing: nothing stays open."""
