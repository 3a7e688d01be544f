"""CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from alignment_core import control_groups


def usable_cores() -> int:
    """Hardware threads that this process may run on, or as many as a container's quota of processor time pays for."""
    quotas = [math.ceil(quota) for group in control_groups.around("cpu") for quota in _quota(group)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def physical_cores() -> int:
    """:func:`usable_cores`, where two hardware threads of a core count as one: they are no faster at products of matrices."""
    usable = usable_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def _quota(group: Path) -> Iterator[float]:
    """Cores' worth of time that a control group has, if it has a limit."""
    with suppress(OSError, ValueError):  # version 2, where `max` means that there is no limit
        quota, period = (int(part) for part in (group / "cpu.max").read_text().split())
        yield quota / period
    with suppress(OSError, ValueError):  # version 1, where -1 means it
        quota = int((group / "cpu.cfs_quota_us").read_text())
        if quota > 0:
            yield quota / int((group / "cpu.cfs_period_us").read_text())
