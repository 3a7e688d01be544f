"""The cause of actors' deaths in one sentence: Ray's reason and, where memory ran out, the processes that used it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

from alignment_core.errors import InfrastructureError, MemoryPressure
from alignment_core.machine_memory import gib, used_by

_MONITOR = re.compile(r"Memory usage (?P<used>\d+)B exceeded threshold of (?P<threshold>\d+)B")
_KILLED = re.compile(r"pid=\d+, actual memory used=(?P<size>[\d.]+)GB")
_LARGEST = re.compile(r"^(?P<pid>\d+)\t(?P<size>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)
_DETAIL = re.compile(r"Worker exit type: (?P<kind>\w+) Worker exit detail: (?P<detail>.*?\.)(?:\s|$)", re.DOTALL)
_PID = re.compile(r"^\s*pid: (?P<pid>\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class MonitorKill:
    """A message of Ray's memory monitor about workers that it killed. Sizes in bytes."""

    used: int
    """Memory of all processes of the machine, or of the control group."""
    threshold: int
    killed: int
    """Memory of the killed workers."""
    largest: tuple[int, int, str] | None
    """Process id, bytes and program of the process that used the most; its arguments may be secret."""

    @classmethod
    def parse(cls, text: str) -> MonitorKill | None:
        """None if the text is no message of the memory monitor. Ray's GB are GiB."""
        usage = _MONITOR.search(text)
        if usage is None:
            return None
        killed = sum(int(float(process["size"]) * 2**30) for process in _KILLED.finditer(text))
        first = _LARGEST.search(text)
        largest = None
        if first is not None:
            largest = (int(first["pid"]), int(float(first["size"]) * 2**30), _program(first["command"]))
        return cls(int(usage["used"]), int(usage["threshold"]), killed, largest)


def death(group: str, dead: list[str], call: str, error: Exception) -> InfrastructureError:
    """The error for actors of a group that died during a call, from the exception that Ray raised for it.

    It is MemoryPressure if Ray's memory monitor killed them while other processes used more memory than this run.
    """
    text = str(error)
    event = f"{group}: {'an actor' if len(dead) < 2 else f'{len(dead)} actors'} died during `{call}`"
    names = f" ({', '.join(dead)})" if dead else ""
    if (kill := MonitorKill.parse(text)) is not None:
        by_this_run = kill.killed + used_by(psutil.Process())
        by_others = max(0, kill.used - by_this_run)
        pronoun = "it" if len(dead) < 2 else "them"
        sentence = (
            f"{event}{names}: Ray's memory monitor killed {pronoun}, because {gib(kill.used)} of memory were in use and its "
            f"limit is {gib(kill.threshold)}: this run used {gib(by_this_run)}, other processes {gib(by_others)}"
        )
        if kill.largest is not None and by_others > by_this_run:
            number, size, program = kill.largest
            sentence += f" (the largest process: {program}, pid {number}, {gib(size)})"
        return MemoryPressure(sentence, by_this_run) if by_others > by_this_run else InfrastructureError(sentence)
    pid, detail = _PID.search(text), _DETAIL.search(text)
    if detail is not None:
        process = f"its process {pid['pid']}" if pid else "its process"
        return InfrastructureError(
            f"{event}{names}: {process} ended ({detail['kind']}: {' '.join(detail['detail'].split())})"
        )
    return InfrastructureError(f"{event}{names}: {text.splitlines()[0] if text else type(error).__name__}")


def _program(command: str) -> str:
    """The program of a command line, without its folder."""
    return command.split()[0].rpartition("/")[2] if command.split() else command
