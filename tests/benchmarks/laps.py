"""Sides that take laps in turn. Each is a separate process that takes a lap on request, so that drift of the
machine affects all equally."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

LAPS = 3
"""That are measured; each side takes one more first."""
THREADS = 1
"""Of a side."""

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


def compare(model: Path, rows: Rows, runners: Sequence[Runner]) -> dict[str, list[Times]]:
    """The measured laps of all runners, taken in turn."""
    context = get_context("spawn")
    lines, processes = {}, []
    for runner in runners:
        lines[runner.name], theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, runner, model, rows), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
    laps: dict[str, list[Times]] = {runner.name: [] for runner in runners}
    try:
        for number in range(LAPS + 1):
            for name, line in lines.items():
                line.send(None)
                lap = line.recv()
                if number:
                    laps[name].append(lap)
    finally:
        for line in lines.values():
            line.close()
        for process in processes:
            process.join()
    return laps


def _serve(line: Connection, runner: Runner, model: Path, rows: Rows) -> None:
    os.dup2(2, 1)  # output of trainers, not of the protocol
    import torch

    torch.set_num_threads(THREADS)
    try:
        runner.side(Laps(line), model, rows, runner.settings)
    except EOFError:  # no further lap is requested
        return
