"""The environment of this process, as records keep it: the code's commit, Python, installed distributions, processors."""

from __future__ import annotations

import functools
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from alignment_core.processes import inherited
from alignment_core.source_code import PACKAGE, ROOT

_GIT = ("git", "--no-optional-locks", "-c", "safe.directory=*", "-c", "core.fsmonitor=false")
"""The checkout may belong to another user; its own configuration starts no program."""
_GIT_SECONDS = 10.0
_SHORT = 12
"""Digits of a commit in the code's version."""


@dataclass(frozen=True)
class Code:
    """The code of this package: its version, and where it runs from a checkout, the commit and the files that differ from
    it."""

    version: str
    commit: str = ""
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Such as ``0.1.0+240b6a0f1c2d.dirty``."""
        commit = f"+{self.commit[:_SHORT]}" if self.commit else ""
        return f"{self.version}{commit}{'.dirty' if self.changed else ''}"


@functools.cache
def code() -> Code:
    """The code as it was at the first call in this process; a run ends if it changes afterwards."""
    return Code(metadata.version("alignment"), *_commit_of(ROOT))


def _commit_of(root: Path) -> tuple[str, tuple[str, ...]]:
    """The commit of a checkout and its changed files of the package; nothing for an installed package, even if it is installed
    below the checkout of another project, or without git."""
    if _git(root, "ls-files", "--error-unmatch", f"{PACKAGE}/__init__.py") is None:
        return "", ()
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--no-renames", "-z", "--", PACKAGE, "flows", "tasks")
    if commit is None or changed is None:
        return "", ()
    return commit.strip(), tuple(sorted(entry[3:] for entry in changed.split("\0") if entry))


def _git(root: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails, or there is no git."""
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(root), *arguments],
            env=inherited(),
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout


def environment(hardware: dict[str, Any]) -> dict[str, Any]:
    """The environment as plain data, with the ``hardware`` of this process."""
    return {
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "platform": {"system": platform.system(), "release": platform.release(), "libc": " ".join(platform.libc_ver())},
        "code": {"version": code().version, "commit": code().commit, "changed": list(code().changed)},
        "hardware": hardware,
        "distributions": distributions(),
    }


@functools.cache
def distributions() -> dict[str, str]:
    """The version of every installed distribution, by its normalised name."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        with suppress(AttributeError, KeyError, OSError, TypeError, ValueError):  # a broken installation of any package
            name, version = distribution.metadata["Name"], distribution.version
            if name and version:
                versions.setdefault(name.lower().replace("_", "-").replace(".", "-"), version)
    return dict(sorted(versions.items()))
