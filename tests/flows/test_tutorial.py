"""The shortest of the tutorials, as a reader types it; ``make test-long`` runs them all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pages import DOCS, files_of, run_page, script_of

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", [*TUTORIALS, DOCS / "flows.md"], ids=lambda page: page.stem)
def test_every_tutorial_runs_a_command_on_files_that_it_shows(page: Path) -> None:
    assert files_of(page)
    assert "align run" in script_of(page)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_every_command_of_the_shortest_tutorial_runs(tmp_path: Path, migrated: Path) -> None:
    (tmp_path / "home" / "prefect").mkdir(parents=True)
    shutil.copyfile(migrated, tmp_path / "home" / "prefect" / "prefect.db")
    run_page(DOCS / "tutorials" / "from-trl.md", tmp_path, 800)
