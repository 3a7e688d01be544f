"""Processes that tests watch from outside, start as their own children, or let die at a chosen system call."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from alignment_core.cluster.actor import Actor

SIGNS = (  # roles of processes by command line, the first match
    ("flow", "alignment.flows.cli.main run"),
    ("supervisor", "alignment_core.host.supervisor"),
    ("host", "alignment_core.host.server"),
    ("environments", "environments.calls:act"),
    ("verifier", "alignment_core.user_code.process"),
    ("raylet", "raylet/raylet"),
    ("gcs", "gcs/gcs_server"),
    ("actor", f"ray::{Actor.__name__}"),
    ("agent", "ray::"),
    ("agent", "cluster/idle_agent.py"),
)


def processes_of(home: Path) -> dict[int, str]:
    """Every process that inherited this ALIGN_HOME, with its command line: the whole tree, daemons included."""
    processes = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("ALIGN_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                processes[process.pid] = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return processes


def role_of(line: str) -> str | None:
    """The role of a run's process, by its command line."""
    return next((role for role, sign in SIGNS if sign in line), None)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came to hold within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def wait_while_advancing(condition: Callable[[], bool], progress: Callable[[], object], seconds: float) -> bool:
    """Whether the condition came to hold, while ``progress`` gave another value at least every so many seconds. (A machine
    that others use takes minutes for what takes seconds alone, so no total would be right.)"""
    seen, deadline = progress(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        if (now := progress()) != seen:
            seen, deadline = now, time.monotonic() + seconds
        time.sleep(0.1)
    return condition()


def free_port() -> int:
    """A free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_child(work: Callable[[], Any]) -> int:
    """Start ``work`` in a forked process; its pid."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def ended(child: int) -> int:
    """Wait for a child; its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(step: int, names: Iterable[str] = ("fsync", "link", "utime")) -> None:
    """From now on this process dies by SIGKILL at its ``step``-th call of one of these functions of ``os``; the
    default are those that change a store durably.

    The calls stay real, with a counter in front.
    """
    taken = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return count

    for name in names:
        setattr(os, name, counted(getattr(os, name)))
