"""Watch the run's state on the server: a run that was cancelled, or taken over by a later attempt, stops itself.

Prefect's worker ends the process of a cancelled run, but not after the worker was restarted, and not if ``align run`` started
the process.
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
    """Calls ``stop`` when this process must not continue the run; ``cancelled`` and ``lost`` say why."""

    def __init__(self, run_id: str, stop: Callable[[], None]) -> None:
        self.cancelled = False
        self.lost = False
        self._run_id = UUID(run_id)
        self._stop = stop
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
                self._read_state()
            except Exception as error:  # an unreachable server is no reason to stop
                log.debug("cannot read the state of run %s: %s", self._run_id, error)
            if self.cancelled or self.lost:
                self._stop()
                return

    def _read_state(self) -> None:
        with get_client(sync_client=True) as client:
            try:
                flow_run = client.read_flow_run(self._run_id)
            except prefect.exceptions.ObjectNotFound:
                self.cancelled = True  # deleted
                return
        state = flow_run.state
        if state is None or self._over.is_set():
            return
        self._attempt = self._attempt or flow_run.run_count
        taken_over = state.is_final() or state.is_scheduled() or flow_run.run_count > self._attempt
        self.cancelled = state.is_cancelling() or state.is_cancelled()
        self.lost = taken_over and not self.cancelled
