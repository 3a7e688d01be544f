"""Installed packages are pinned by digest, which pip checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path for path in (ROOT / "requirements").glob("*.txt") if not path.name.startswith("overrides"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_has_one_version_and_a_digest(lock: Path) -> None:
    lines = re.sub(r"\\\n", "", lock.read_text()).splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert packages
    for package in packages:
        assert re.match(r"\S+==\S+ .*--hash=sha256:[0-9a-f]{64}", package), package[:80]


def test_pip_checks_the_digests_of_every_lock_file_that_make_installs() -> None:
    commands = re.sub(r"\\\n", "", (ROOT / "Makefile").read_text()).splitlines()
    installs = [command for command in commands if " -r requirements/" in command]
    assert installs
    assert all("--require-hashes" in command for command in installs)
