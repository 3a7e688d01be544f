"""Sides that take laps in turn. Each is a separate process that takes a lap on request, so that drift of the
machine affects all equally."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

LAPS = 3
"""That are measured; each side takes one more first."""
THREADS = 1
"""Of a side, unless it has other ones."""
SAMPLE_SECONDS = 0.25
"""Between two looks at the memory of a side."""

Rows = list[dict[str, Any]]
Times = dict[str, np.ndarray]
"""By part; ``all`` is the whole lap. [2] each: seconds, and CPU seconds of all processes of the side."""
NO_TIME = np.zeros(2)


class Clock:
    """Begins when it is made."""

    def __init__(self) -> None:
        self.began = self._now()

    def _now(self) -> np.ndarray:
        me = psutil.Process()
        cpu = 0.0
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu += times.user + times.system
        return np.array([time.perf_counter(), cpu])

    def passed(self) -> np.ndarray:
        return self._now() - self.began


class Laps:
    """In a side's process: reports the end of a lap, and waits for the start of the next."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.parts: Times = {}
        """Of the lap that is under way."""
        self._wait()

    def _wait(self) -> None:
        self.line.recv()
        self.parts, self.started = {}, Clock()

    def over(self) -> None:
        self.line.send({"all": self.started.passed(), **self.parts})
        self._wait()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose seconds count for ``part`` of the lap."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            started = Clock()
            try:
                return function(*arguments, **options)
            finally:
                self.parts[part] = self.parts.get(part, NO_TIME) + started.passed()

        return wrapped


Side = Callable[[Laps, Path, Rows, Mapping[str, Any]], None]
"""Takes laps as long as requested: with the folder of a model, rows and settings."""


@dataclass(frozen=True)
class Runner:
    """A side, and how it is set."""

    name: str
    side: Side
    settings: Mapping[str, Any]


@dataclass
class Taken:
    """The measured laps of a side, and the most memory that its processes had."""

    laps: list[Times] = field(default_factory=list)
    memory: int = 0
    """Bytes that are no file's, which the system cannot drop."""


def compare(
    model: Path, rows: Rows, runners: Sequence[Runner], laps: int = LAPS, threads: int = THREADS, apart: bool = False
) -> dict[str, Taken]:
    """The measured laps of all runners, taken in turn. With ``apart`` only one side is in memory at a time: each measured lap
    is the second one of new processes."""
    taken = {runner.name: Taken() for runner in runners}
    if apart:
        for _ in range(laps):
            for runner in runners:
                with _started(model, rows, runner, threads, taken[runner.name]) as lap:
                    lap()
                    taken[runner.name].laps.append(lap())
        return taken
    with ExitStack() as stack:
        sides = {
            runner.name: stack.enter_context(_started(model, rows, runner, threads, taken[runner.name]))
            for runner in runners
        }
        for number in range(laps + 1):
            for name, lap in sides.items():
                times = lap()
                if number:
                    taken[name].laps.append(times)
    return taken


@contextmanager
def _started(model: Path, rows: Rows, runner: Runner, threads: int, taken: Taken) -> Iterator[Callable[[], Times]]:
    """A side's process: takes a lap at each call."""
    context = get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, runner, model, rows, threads), daemon=False)
    process.start()
    theirs.close()

    def lap() -> Times:
        line.send(None)
        times: Times = line.recv()
        return times

    try:
        with sampled_memory(process.pid, taken):
            yield lap
    finally:
        line.close()
        process.join()


@contextmanager
def sampled_memory(pid: int | None, taken: Taken) -> Iterator[None]:
    """Keep the most memory that a process and its children have meanwhile."""
    side, ended = psutil.Process(pid), threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            with suppress(psutil.NoSuchProcess):
                taken.memory = max(taken.memory, sum(map(_own_bytes, (side, *side.children(recursive=True)))))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        ended.set()
        sampler.join()


def _own_bytes(process: psutil.Process) -> int:
    """Bytes of a process in memory that are no file's: those of its own and those of shared memory that it has touched."""
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) << 10
    return 0


def _serve(line: Connection, runner: Runner, model: Path, rows: Rows, threads: int) -> None:
    os.dup2(2, 1)  # output of trainers, not of the protocol
    import torch

    torch.set_num_threads(threads)
    try:
        runner.side(Laps(line), model, rows, runner.settings)
    except EOFError:  # no further lap is requested
        return
