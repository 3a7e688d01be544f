"""The flow's side of the run host: starts it on first use, sends stage calls, waits with a deadline."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socketpair
from typing import Any

from alignment_core.errors import AlignmentError, DeadlineExceeded, InfrastructureError, Stopped
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.curve import Line
from alignment_core.execution.key import StageKey
from alignment_core.home import align_home
from alignment_core.host.logs import LogTail, OnLines
from alignment_core.host.protocol import RAY_DIED, Channel, rebuild
from alignment_core.host.subprocess_tree import Supervised, short_folder
from alignment_core.processes import inherited
from alignment_core.recipes import ResourcesConfig

OnProgress = Callable[[dict[str, Any]], None]
OnWait = Callable[[str | None], None]
OnResumed = Callable[[list[Line]], None]
OnWarning = Callable[[str], None]


def placed(error: AlignmentError, label: str, log: Path) -> AlignmentError:
    """The error of a stage with the stage's name before it; one that nobody foresaw says where the log is, too."""
    sentence = str(error) if str(error).startswith(f"{label}: ") else f"{label}: {error}"
    return type(error)(f"{sentence}; the log is {log}" if type(error) is AlignmentError else sentence)


class Host:
    """The run host of one flow run. Use from several threads; close it, or let this process die: both end the tree."""

    def __init__(
        self,
        store: str,
        resources: ResourcesConfig,
        log: Path,
        run_ids: dict[str, str] | None = None,
        recipe: str = "",
        samples: bool = False,
    ) -> None:
        """``run_ids`` and ``recipe`` are what other runs of this machine are told that they wait for. ``samples`` says
        that engines will be needed, so that they begin to start at once."""
        self.store, self.resources, self.log, self.samples = store, resources, log, samples
        self.run_ids, self.recipe = run_ids or {}, recipe
        self._starting = threading.Lock()
        self._session: _Session | None = None
        self._closed = False
        self._log_start = log.stat().st_size if log.exists() else 0  # an earlier attempt of the same run wrote the rest
        self._tail: LogTail | None = None

    def follow(self, on_lines: OnLines) -> None:
        """Hand on what the host and its actors print, from the beginning, until ``close``; see :class:`LogTail`."""
        self._tail = LogTail(self.log, self._log_start, on_lines)

    def start(self) -> None:
        """Begin to start the host's process; ``run`` waits for it. Without this the first ``run`` starts it."""
        self._ready()

    def run(
        self,
        call: StageCall,
        on_progress: OnProgress = lambda _: None,
        order: int = 0,
        on_wait: OnWait = lambda _: None,
        key: StageKey | None = None,
        on_resumed: OnResumed = lambda _: None,
        on_warning: OnWarning = lambda _: None,
        on_start: OnWait = lambda _: None,
    ) -> StageResult:
        """Execute a call and wait for it. Of the stages that wait for a machine the one with the least ``order`` goes on.
        The host works out the ``key`` where it is not given.

        ``on_wait`` is told what the stage waits for, in words, and None when it goes on. ``on_resumed`` gets the curve of a
        checkpoint from which the stage is resumed, ``on_warning`` a sentence for each time the stage restarts in its host.
        ``on_start`` is told what is being started for the stage, and None once it is there.
        Raises the stage's own error, InfrastructureError if the host died, DeadlineExceeded after the recipe's
        ``stage_timeout_seconds``, not counting waits for a machine. After any DeadlineExceeded the host is ended, with
        all that it started: the next call has a new one.
        """
        requested = time.monotonic()  # one clock for all processes of a machine
        on_start("the run host")
        session = self._ready()
        request = {
            "requested": requested,
            "call": call.model_dump(mode="json"),
            "key": key and key.model_dump(mode="json"),
            "run_ids": self.run_ids,
            "recipe": self.recipe,
            "order": order,
        }
        clock = _Clock(self.resources.stage_timeout_seconds)
        with session.ask(request) as answers:
            while True:
                try:
                    message = answers.get(timeout=clock.left())
                except queue.Empty:
                    self._end_session(session)
                    raise DeadlineExceeded(
                        f"{call.label} took longer than its {clock.seconds:g} seconds (resources.stage_timeout_seconds)"
                    ) from None
                if self._closed:
                    raise Stopped(f"{call.label}: the run was stopped")
                if message["event"] == "progress":
                    on_progress(message)
                elif message["event"] == "resumed":
                    on_resumed(message["lines"])
                elif message["event"] == "waits":
                    clock.stop() if message["for"] else clock.go_on()
                    on_wait(message["for"])
                elif message["event"] == "starts":
                    on_start(message["what"])
                elif message["event"] == "warning":
                    on_warning(message["sentence"])
                elif message["event"] == "done":
                    return StageResult.model_validate(message["result"])
                elif message["event"] == "failed":
                    error = placed(rebuild(message["error"]), call.label, self.log)
                    if isinstance(error, DeadlineExceeded):
                        self._end_session(session)
                    raise error
                else:
                    self._end_session(session)  # its supervisor then has the host's exit code
                    raise InfrastructureError(
                        f"{call.label}: the run host died ({_how_it_ended(session.host.process.returncode)}); see {self.log}"
                    )

    def _ready(self) -> _Session:
        with self._starting:
            if self._closed:
                raise Stopped("the run was stopped")
            if self._session is None or self._session.over.is_set():
                if self._session is not None:
                    self._session.close()
                self._session = _Session(self.store, self.resources, self.log, self.samples)
            return self._session

    def close(self) -> None:
        """End the host and every process below it, for good."""
        self._closed = True
        if self._tail is not None:
            self._tail.close()
        self._end_session()

    def _end_session(self, only: _Session | None = None) -> None:
        """End the current session (if it is ``only``). Nobody starts another before all of it is gone: devices are free."""
        with self._starting:
            session = self._session
            if session is not None and only in (None, session):
                self._session = None
                session.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _how_it_ended(code: int | None) -> str:
    """An exit code of the supervisor in words: it is the host's, or 128 and the number of the signal that ended it."""
    if code == RAY_DIED:
        return "one of Ray's daemons died"
    if code is None or code < 0:
        return "its supervisor was killed"
    if code == 128 + signal.SIGKILL:
        return "it was killed by SIGKILL, as the kernel does where memory runs out"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


class _Clock:
    """Counts down ``seconds``, with pauses."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._stopped_at: float | None = None

    def left(self) -> float | None:
        """Seconds to the deadline; none while the clock stands."""
        return None if self._stopped_at is not None else max(0.0, self._deadline - time.monotonic())

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._deadline += time.monotonic() - self._stopped_at
            self._stopped_at = None


class _Session:
    """One host process, from its start to its end."""

    def __init__(self, store: str, resources: ResourcesConfig, log: Path, samples: bool) -> None:
        self.over = threading.Event()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._number = 0
        mine, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        with theirs:
            temporary = short_folder()
            host = [sys.executable, "-m", "alignment_core.host.server", str(theirs.fileno())]
            self.host = Supervised(
                [*host, store, resources.model_dump_json(), str(temporary), str(int(samples))],
                _environment(resources, temporary),
                log,
                temporary,
                inherited=[theirs.fileno()],
                grace=resources.stop_seconds,
            )
        self.channel = Channel(mine)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for message in self.channel.messages():
            with self._lock:
                waiting = self._answers.get(message["id"])
            if waiting is not None:
                waiting.put(message)
        self.over.set()
        with self._lock:
            for waiting in self._answers.values():
                waiting.put({"event": "died"})

    @contextlib.contextmanager
    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request; the answers arrive in the queue that this yields."""
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answers
        try:
            try:
                self.channel.send({"id": number, **request})
            except OSError:
                answers.put({"event": "died"})
            if self.over.is_set():
                answers.put({"event": "died"})
            yield answers
        finally:
            with self._lock:
                del self._answers[number]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.end.shutdown(2)
        self.channel.end.close()
        self.host.close()


def _environment(resources: ResourcesConfig, temporary: Path) -> dict[str, str]:
    """The host's environment: what must be set before the libraries are imported."""
    home = align_home()
    caches = {"VLLM_CACHE_ROOT": home / "cache" / "vllm", "TORCHINDUCTOR_CACHE_DIR": home / "cache" / "inductor"}
    environment = {**{name: str(folder) for name, folder in caches.items()}, **inherited()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start costs seconds more
    environment.update(
        TMPDIR=str(temporary),  # each start of vLLM leaves a file there
        OMP_NUM_THREADS=str(resources.threads),
        TOKENIZERS_PARALLELISM="false",
        TQDM_DISABLE="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        VLLM_CONFIG_ROOT=str(home / "cache" / "vllm"),
        VLLM_NO_USAGE_STATS="1",
    )
    return environment
