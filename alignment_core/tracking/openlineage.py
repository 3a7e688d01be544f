"""OpenLineage: a listener that sends an event when a stage starts, completes, fails or is stopped, to a file or a server."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, uuid5

from alignment_core.credentials import cut, remember
from alignment_core.errors import Stopped, one_line
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.journal import RunRecord
from alignment_core.tracking.listener import Listener

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

    from alignment_core.tracking.openlineage_events import StageJob

SENT = "openlineage.jsonl"
"""File in a run's folder: label and key of each stage whose completion was sent. A resumed run does not send them again."""
API_KEY, ENDPOINT = "OPENLINEAGE_API_KEY", "OPENLINEAGE_ENDPOINT"
"""Variables of OpenLineage's own client."""
PATH = "api/v1/lineage"
"""Where servers take events, below their address."""
TIMEOUT_SECONDS = 2.0
OF_THE_MOMENT = (401, 403, 404, 408, 429)
"""Statuses that say nothing about the event."""
NOT_SENT = object()
"""What a sender returns that is switched off."""
RETRY_SECONDS = 30.0
"""Least time between attempts to send to a server that does not answer."""


def attempt_id(run: str, number: int) -> str:
    """The id of an attempt of a run. A resumed run is another attempt, as OpenLineage knows no way back from a failure."""
    return str(uuid5(NAMESPACE_URL, f"urn:alignment:attempt:{run}/{number}"))


class OpenLineageEvents(Listener):
    """A listener that sends events of a run's stages to ``target``, a file or an address. ``folder`` is the run's folder.

    ``warn`` gets one sentence if the target cannot be written or reached; what was not sent then is sent later, if it can be.
    """

    def __init__(self, target: str, run: RunRecord, folder: Path, warn: Callable[[str], None]) -> None:
        from alignment_core.tracking import openlineage_events

        self._events = openlineage_events
        self._run = run
        self._attempt = attempt_id(run.run_id, run.attempt)
        self._outbox = Outbox(target, warn)
        self._file = folder / SENT
        self._sent = _sent_earlier(self._file)
        self._jobs: dict[str, StageJob] = {}
        """By label, the stages that have not ended."""
        self._begun: set[str] = set()
        """Labels of the stages whose START was sent."""

    def requested(self, call: StageCall, key: str) -> None:
        self._jobs[call.label] = self._events.StageJob(
            self._run.store,
            self._run.name,
            call.stage,
            call.label,
            key,
            self._run.run_id,
            self._attempt,
            call.inputs,
            self._events.version(),
        )

    def started(self, label: str) -> None:
        self._begin(label, cached=False)

    def produced(self, result: StageResult) -> None:
        cached = result.state == "cached"
        job = self._jobs.get(result.label)
        if job and cached and (job.label, job.key) in self._sent and job.label not in self._begun:
            del self._jobs[job.label]  # an earlier attempt of the run has sent it
            return
        self._begin(result.label, cached)
        if (job := self._jobs.pop(result.label, None)) is None:
            return
        facet = {
            "cached": cached,
            **({"record": result.key} if cached else {}),
            "reason": result.reason,
            "seconds": result.seconds,
            **self._events.measured(result.metrics, result.cost),
        }
        event = job.event("COMPLETE", self._events.now(), facet, result.outputs.values())
        self._outbox.put(event, lambda: self._note_sent(job))

    def raised(self, label: str, error: BaseException) -> None:
        self._end(label, "ABORT" if isinstance(error, Stopped) else "FAIL", str(error) or type(error).__name__)

    def ended(self, completed: bool) -> None:
        for label in [label for label in self._jobs if label in self._begun]:
            self._end(label, "ABORT", "the run ended before the stage")
        self._outbox.close()

    def _begin(self, label: str, cached: bool) -> None:
        """Send START, once: a stage that is retried starts again."""
        if label in self._jobs and label not in self._begun:
            self._begun.add(label)
            self._outbox.put(self._jobs[label].event("START", self._events.now(), {"cached": cached}))

    def _end(self, label: str, state: str, error: str) -> None:
        self._begin(label, cached=False)
        if (job := self._jobs.pop(label, None)) is not None:
            self._outbox.put(job.event(state, self._events.now(), {"cached": False}, error=error))

    def _note_sent(self, job: StageJob) -> None:
        with suppress(OSError):  # a resumed run then sends it again, as cached
            append(self._file, json.dumps([job.label, job.key]))


def _sent_earlier(path: Path) -> set[tuple[str, str]]:
    """Label and key of the stages whose completion an earlier attempt sent; unreadable lines are left out."""
    sent = set()
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                label, key = json.loads(line)
                sent.add((label, key))
    return sent


class Outbox:
    """Events on their way to a file or a server, in order. It never raises; a target that fails is tried again with later
    events, at most every ``RETRY_SECONDS``, and at the end. An event that a server refuses for what it is, is left out."""

    def __init__(self, target: str, warn: Callable[[str], None]) -> None:
        self._target = target
        self._warn = warn
        self._waiting: deque[tuple[RunEvent, Callable[[], None]]] = deque()
        self._send: Callable[[RunEvent], object] | None = None
        self._retry_at = 0.0
        self._warned = False
        self._refused = 0

    def put(self, event: RunEvent, sent: Callable[[], None] = lambda: None) -> None:
        """Send an event, or keep it for later; ``sent`` is called once it is sent."""
        self._waiting.append((event, sent))
        self.flush()

    def close(self) -> None:
        """Try once more to send what waits, and name what is lost."""
        self._retry_at = 0.0
        self.flush()
        if self._waiting:
            self._warn(f"OpenLineage: {len(self._waiting)} events were not sent to {cut(self._target)}")

    def flush(self) -> None:
        """Send what waits, unless the target failed a moment ago."""
        if time.monotonic() < self._retry_at:
            return
        while self._waiting:
            event, sent = self._waiting[0]
            try:
                if self._send is None:
                    self._send = _sender(self._target)
                if self._send(event) is not NOT_SENT:
                    sent()
                self._waiting.popleft()
            except Exception as error:
                if _refuses_event(error):
                    self._waiting.popleft()
                    if not self._refused:
                        self._warn(f"OpenLineage: {cut(self._target)} {_reason(error)} for an event, which is left out")
                    self._refused += 1
                    continue
                self._retry_at = time.monotonic() + RETRY_SECONDS
                if not self._warned:
                    self._warned = True
                    self._warn(
                        f"OpenLineage: {cut(self._target)} {_reason(error)}; the run continues, and sends its events later if "
                        "it can"
                    )
                return


def _sender(target: str) -> Callable[[RunEvent], object]:
    """A function that sends an event and raises if that fails; nothing is sent with ``OPENLINEAGE_DISABLED=true``, a variable
    of OpenLineage's own client."""
    from openlineage.client.serde import Serde

    if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return lambda event: NOT_SENT
    if not target.startswith(("http://", "https://")):
        return lambda event: append(Path(target), Serde.to_json(event))
    from openlineage.client.transport.http import HttpConfig, HttpTransport

    key = os.environ.get(API_KEY)
    if key:
        remember(key)
    endpoint = os.environ.get(ENDPOINT) or PATH
    transport = HttpTransport(
        HttpConfig.from_dict(
            {
                "url": target.rstrip("/").removesuffix(f"/{endpoint}") + "/",
                "endpoint": endpoint,
                "timeout": TIMEOUT_SECONDS,
                "retry": {"total": 0, "read": False, "status_forcelist": []},
                **({"auth": {"type": "api_key", "apiKey": key}} if key else {}),
            }
        )
    )
    emit: Callable[[RunEvent], object] = transport.emit
    return emit


def _refuses_event(error: Exception) -> bool:
    """Whether a server refuses the event itself, and would do so again; not the sender, the address or the moment."""
    import requests

    if not isinstance(error, requests.HTTPError) or error.response is None:
        return False
    return 400 <= error.response.status_code < 500 and error.response.status_code not in OF_THE_MOMENT


def append(path: Path, line: str) -> None:
    """Add a line to a file, in one piece because other runs may write it, too. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{line}\n".encode()
    with path.open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a process was killed within its line
                data = b"\n" + data
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reason(error: Exception) -> str:
    """Why a target takes no events, in words."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answers {error.response.status_code} {error.response.reason}".rstrip()
    if isinstance(error, requests.Timeout):
        return f"does not answer within {TIMEOUT_SECONDS:g} s"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be written: {error.strerror}"
    return f"takes no events: {one_line(cut(f'{type(error).__name__}: {error}'))}"
