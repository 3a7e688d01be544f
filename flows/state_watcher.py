"""Watching the run's own state on the server: a run that was cancelled, or taken over by a later attempt, stops itself.

Prefect's worker ends the process of a run that is cancelled, but not after the worker was started anew, and not where
``align run`` started it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from uuid import UUID

import prefect.exceptions
from prefect.client.orchestration import get_client

POLL_SECONDS = 10.0
log = logging.getLogger(__name__)


class Watch:
    """Calls ``stop`` once the run is not this process's to run any more; ``cancelled`` and ``lost`` say why."""

    def __init__(self, run_id: str, stop: Callable[[], None]) -> None:
        self.cancelled = self.lost = False
        self._run_id, self._stop = UUID(run_id), stop
        self._attempt: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _loop(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._look()
            except Exception as error:  # a server that is away is no reason to stop
                log.debug("cannot read the state of run %s: %s", self._run_id, error)
            if self.cancelled or self.lost:
                self._stop()
                return

    def _look(self) -> None:
        with get_client(sync_client=True) as client:
            try:
                seen = client.read_flow_run(self._run_id)
            except prefect.exceptions.ObjectNotFound:
                self.cancelled = True  # deleted
                return
        state = seen.state
        if state is None or self._over.is_set():
            return
        self._attempt = self._attempt or seen.run_count
        taken_over = state.is_final() or state.is_scheduled() or seen.run_count > self._attempt
        self.cancelled = state.is_cancelling() or state.is_cancelled()
        self.lost = taken_over and not self.cancelled
