"""A command line as a recipe, in a separate folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.migrate import Migration, migrate, read

Migrate = Callable[[str], Migration]


@pytest.fixture
def migrated(tmp_path: Path) -> Migrate:
    """``migrated("trl sft …")`` is its recipe with the outcome of each flag."""
    return lambda command: migrate(read(command), tmp_path, tmp_path)
