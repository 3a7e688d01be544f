"""Memory of this machine, or of the control group around this process, and its use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from alignment_core import control_groups

GIB = 1 << 30
LIMIT_AND_USE = (("max", "current"), ("limit_in_bytes", "usage_in_bytes"))
"""Files of a control group, of version 2, where a text such as ``max`` means that there is no limit, and of version 1."""
MONITOR_THRESHOLD = "RAY_memory_usage_threshold"
DEFAULT_THRESHOLD = 0.95


@dataclass(frozen=True)
class Memory:
    """Bytes. Page cache that the kernel can drop counts as free."""

    total: int
    used: int

    @property
    def usable(self) -> int:
        """Bytes that all processes together may use before Ray's memory monitor kills actors."""
        return int(self.total * float(os.environ.get(MONITOR_THRESHOLD) or DEFAULT_THRESHOLD))

    @property
    def free(self) -> int:
        """Bytes that are left until then."""
        return max(0, self.usable - self.used)


def machine_memory() -> Memory:
    """The memory of this machine, or of the control group around this process with the least free memory."""
    machine = psutil.virtual_memory()
    known = [Memory(machine.total, machine.total - machine.available)]
    known += [Memory(limit, used) for limit, used in _limits() if limit < machine.total]
    return min(known, key=lambda memory: memory.free)


def cgroup_limit() -> int | None:
    """Bytes that this process's control group, or one around it, allows; None without a limit. Versions 1 and 2."""
    return min((limit for limit, _ in _limits()), default=None)


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each control group around this process that has a limit."""
    for group in control_groups.around("memory"):
        for limit, used in LIMIT_AND_USE:
            with suppress(OSError, ValueError):
                yield int((group / f"memory.{limit}").read_text()), _used_in(group, used)


def _used_in(group: Path, name: str) -> int:
    """Bytes that a control group uses, without the page cache that the kernel drops first."""
    with suppress(OSError, ValueError):
        used = int((group / f"memory.{name}").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return 0


def used_by(process: psutil.Process) -> int:
    """Bytes that a process and all its descendants use; memory that several share counts once (PSS)."""
    total = 0
    with suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, AttributeError):
                total += member.memory_full_info().pss
    return total


def gib(size: float) -> str:
    """Such as ``3.1 GiB``."""
    return f"{size / GIB:.1f} GiB"
