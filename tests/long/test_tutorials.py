"""Every command of the tutorials and of docs/flows.md, as a reader types it, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS, run_page, script_of

PAGES = [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "flows.md"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    assert "align " in script_of(page)
    run_page(page, tmp_path, 1700)
