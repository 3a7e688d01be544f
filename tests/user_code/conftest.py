"""The user's files of one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.user_code.calls import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of this name and text below the test's folder, and returns its path."""

    def put(name: str, source: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return str(path)

    return put
