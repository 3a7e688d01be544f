"""Limits of the control groups around a process, as the kernel writes them (Documentation/admin-guide/cgroup-v1 and -v2)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from alignment_core import control_groups, cores
from alignment_core.machine_memory import cgroup_limit


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for ``cgroup``, the groups of this process, and ``mount``, those of the machine."""
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "MOUNT", tmp_path / "mount")
    return tmp_path


def write(groups: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_least_limit_of_memory_counts(groups: Path) -> None:
    write(
        groups,
        {"mount/outer/memory.max": "1000\n", "mount/outer/inner/memory.max": "max\n", "cgroup": "0::/outer/inner\n"},
    )
    assert cgroup_limit() == 1000
    write(groups, {"mount/memory/job/memory.limit_in_bytes": "500\n", "cgroup": "3:cpuset:/\n2:memory:/job\n"})
    assert cgroup_limit() == 500
    (groups / "cgroup").unlink()
    assert cgroup_limit() is None


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({"cgroup": "0::/\n", "mount/cpu.max": "max 100000\n"}, 8),
        ({"cgroup": "0::/\n", "mount/cpu.max": "200000 100000\n"}, 2),  # docker run --cpus 2
        ({"cgroup": "0::/\n", "mount/cpu.max": "250000 100000\n"}, 3),  # three threads share two and a half cores
        ({"cgroup": "0::/\n", "mount/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "cgroup": "0::/pod/box\n",
                "mount/pod/cpu.max": "400000 100000\n",
                "mount/pod/box/cpu.max": "max 100000\n",
            },
            4,
        ),
        (
            {
                "cgroup": "4:memory:/\n3:cpu,cpuacct:/docker/1f\n",
                # A container sees its own group at the root of the mount.
                "mount/cpu/cpu.cfs_quota_us": "600000\n",
                "mount/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        ({"cgroup": "3:cpu:/\n", "mount/cpu/cpu.cfs_quota_us": "-1\n", "mount/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cgroup": "0::/\n", "mount/cpu.max": "\n"}, 8),
        ({}, 8),
    ],
)
def test_a_quota_of_processor_time_counts_as_cores(
    groups: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    write(groups, files)
    assert cores.usable_cores() == usable
    assert cores.physical_cores() == min(usable, 4)
