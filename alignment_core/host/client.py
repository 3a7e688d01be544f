"""The flow's side of the run host: starts it on first use, sends stage calls, waits with a deadline."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
    """The error of a stage with its label in front; unexpected errors also get the path of the log."""
    sentence = str(error) if str(error).startswith(f"{label}: ") else f"{label}: {error}"
    return type(error)(f"{sentence}; the log is {log}" if type(error) is AlignmentError else sentence)


class Host:
    """The run host of one flow run, for use from several threads. Closing it or the end of this process ends the tree."""

    def __init__(
        self,
        store: str,
        resources: ResourcesConfig,
        log: Path,
        recipe: str = "",
        prewarm: Sequence[str] = ("trainers",),
    ) -> None:
        """``recipe`` and ``run_ids`` name this run to other runs on the machine that wait for it. ``prewarm`` has the groups of
        actors, ``trainers`` and ``engines``, that start with the host, in this order."""
        self.store = store
        self.resources = resources
        self.log = log
        self.prewarm = prewarm
        self.run_ids: dict[str, str] = {}
        """Set as soon as the run has its id."""
        self.recipe_files: dict[str, str] = {}
        self.overrides: tuple[str, ...] = ()
        """What records keep of the run's recipe, see :class:`~alignment_core.execution.runner.StageRequest`."""
        self.recipe = recipe
        self._starting = threading.Lock()
        self._session: _Session | None = None
        self._closed = False
        # what the log holds by now is of an earlier attempt of the run
        self._log_start = log.stat().st_size if log.exists() else 0
        self._tail: LogTail | None = None

    def follow(self, on_lines: OnLines) -> None:
        """Forward the output of the host and its actors until ``close``; see :class:`LogTail`."""
        self._tail = LogTail(self.log, self._log_start, on_lines)

    def start(self) -> None:
        """Start the host's process in the background. Without this the first ``run`` starts it."""
        self._live_session()

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
        """Execute a call and wait for its result. Among stages that wait for a machine, the lowest ``order`` is next. The host
        computes the ``key`` if it is not given.

        ``on_wait`` gets the reason for each wait, and None at its end; ``on_start`` the component that starts for the stage,
        and None once it is ready; ``on_resumed`` the curve of the checkpoint from which the stage resumes; ``on_warning`` a
        sentence for each restart of the stage in its host.
        Raises the stage's own error, InfrastructureError if the host died, and DeadlineExceeded after the recipe's
        ``no_progress_timeout_seconds`` without a message, or ``stage_timeout_seconds`` in all, not counting waits for a
        machine. After any DeadlineExceeded the host and all its processes are ended, because one of them may hang; the next
        call starts a new host.
        """
        requested = time.monotonic()  # the monotonic clock is the same for all processes of a machine
        on_start("the run host")
        session = self._live_session()
        request = {
            "requested": requested,
            "call": call.model_dump(mode="json"),
            "key": key and key.model_dump(mode="json"),
            "run_ids": self.run_ids,
            "recipe": self.recipe,
            "recipe_files": self.recipe_files,
            "overrides": self.overrides,
            "order": order,
        }
        clock = _Clock(self.resources)
        with session.request(request) as answers:
            while True:
                try:
                    message = answers.get(timeout=clock.left())
                except queue.Empty:
                    self._end_session(session)
                    raise DeadlineExceeded(f"{call.label} {clock.problem}") from None
                clock.restart()
                if self._closed:
                    raise Stopped(f"{call.label}: the run was stopped")
                if message["event"] == "progress":
                    on_progress(message)
                elif message["event"] == "resumed":
                    on_resumed(message["lines"])
                elif message["event"] == "waits":
                    clock.pause() if message["for"] else clock.resume()
                    on_wait(message["for"])
                elif message["event"] == "starts":
                    on_start(message["what"])
                elif message["event"] == "warning":
                    on_warning(message["sentence"])
                elif message["event"] == "heartbeat":
                    pass
                elif message["event"] == "done":
                    return StageResult.model_validate(message["result"])
                elif message["event"] == "failed":
                    error = placed(rebuild(message["error"]), call.label, self.log)
                    if isinstance(error, DeadlineExceeded):
                        self._end_session(session)
                    raise error
                else:
                    self._end_session(session)  # afterwards the supervisor has the host's exit code
                    raise InfrastructureError(
                        f"{call.label}: the run host died ({_exit_reason(session.host.process.returncode)}); see {self.log}"
                    )

    def _live_session(self) -> _Session:
        with self._starting:
            if self._closed:
                raise Stopped("the run was stopped")
            if self._session is None or self._session.over.is_set():
                if self._session is not None:
                    self._session.close()
                self._session = _Session(self.store, self.resources, self.log, self.prewarm)
            return self._session

    def close(self) -> None:
        """End the host and every process below it, for good."""
        self._closed = True
        if self._tail is not None:
            self._tail.close()
        self._end_session()

    def abandon(self) -> None:
        """End the host, which no stage used, without waiting: it may be starting Ray, and its supervisor ends both."""
        self._closed = True
        if self._session is not None:
            self._session.host.cut_lifeline()
        self.log.unlink(missing_ok=True)

    def _end_session(self, only: _Session | None = None) -> None:
        """End the current session (if it is ``only``). The lock keeps the next from starting before devices are free."""
        with self._starting:
            session = self._session
            if session is not None and only in (None, session):
                self._session = None
                session.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exit_reason(code: int | None) -> str:
    """An exit code of the supervisor in words: the host's own, or 128 plus the signal that killed it."""
    if code == RAY_DIED:
        return "one of Ray's daemons died"
    if code is None or code < 0:
        return "its supervisor was killed"
    if code == 128 + signal.SIGKILL:
        return "it was killed by SIGKILL, probably by the kernel because memory ran out"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


class _Clock:
    """The deadlines of a stage and of its next sign of progress, with pauses."""

    def __init__(self, resources: ResourcesConfig) -> None:
        self._patience = resources.no_progress_timeout_seconds or 2 * resources.wait_timeout_seconds
        self._total = resources.stage_timeout_seconds
        now = time.monotonic()
        self._begun = now
        self._latest = now
        """Time of the last sign of progress."""
        self._paused_at: float | None = None

    def left(self) -> float | None:
        """Seconds to the earlier deadline; None while the clock is paused."""
        if self._paused_at is not None:
            return None
        deadline = self._latest + self._patience
        if self._total is not None:
            deadline = min(deadline, self._begun + self._total)
        return max(0.0, deadline - time.monotonic())

    @property
    def problem(self) -> str:
        """The deadline that has passed, as the end of a sentence about the stage."""
        if self._total is not None and self._begun + self._total <= self._latest + self._patience:
            return f"took longer than its {self._total:g} seconds (resources.stage_timeout_seconds)"
        return f"made no progress for {self._patience:g} seconds (resources.no_progress_timeout_seconds)"

    def restart(self) -> None:
        """Note a sign of progress."""
        self._latest = time.monotonic()

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._begun += time.monotonic() - self._paused_at
            self._paused_at = None
            self.restart()


class _Session:
    """One host process, from its start to its end."""

    def __init__(self, store: str, resources: ResourcesConfig, log: Path, prewarm: Sequence[str]) -> None:
        self.over = threading.Event()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._number = 0
        own_socket, child_socket = socketpair(AF_UNIX, SOCK_STREAM)
        with child_socket:
            temporary = short_folder()
            host = [sys.executable, "-m", "alignment_core.host.server", str(child_socket.fileno())]
            self.host = Supervised(
                [*host, store, resources.model_dump_json(), str(temporary), *prewarm],
                _environment(resources, temporary),
                log,
                temporary,
                inherited=[child_socket.fileno()],
                grace=resources.stop_seconds,
            )
        self.channel = Channel(own_socket)
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
    def request(self, request: dict[str, Any]) -> Any:
        """Send a request; its answers arrive in the yielded queue."""
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
    """The host's environment: variables that have to be set before the libraries are imported."""
    home = align_home()
    caches = {"VLLM_CACHE_ROOT": home / "cache" / "vllm", "TORCHINDUCTOR_CACHE_DIR": home / "cache" / "inductor"}
    environment = {**{name: str(folder) for name, folder in caches.items()}, **inherited()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start takes seconds longer
    environment.update(
        TMPDIR=str(temporary),  # each start of vLLM leaves a temporary file
        OMP_NUM_THREADS=str(resources.threads or 1),
        TOKENIZERS_PARALLELISM="false",
        TQDM_DISABLE="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        VLLM_CONFIG_ROOT=str(home / "cache" / "vllm"),
        VLLM_NO_USAGE_STATS="1",
    )
    return environment
