"""One `align up` for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.up import Services


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[Services]:
    home = tmp_path_factory.mktemp("home")
    (home / "prefect").mkdir()
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    patch = pytest.MonkeyPatch()
    patch.setenv("ALIGN_HOME", str(home))
    running = Services(home)
    try:
        running.align("up", "--port", str(running.port))
        yield running
    finally:
        running.align("down")
        patch.undo()
