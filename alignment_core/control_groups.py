"""The Linux control groups around this process, which limit its memory and its processor time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

OWN, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def around(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and those around it that ``controller`` (``cpu``, ``memory``) may limit, of
    versions 1 and 2. In a container some may not exist."""
    for line in OWN.read_text().splitlines() if OWN.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNT / controller if controllers else MOUNT  # version 2 names no controllers
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
