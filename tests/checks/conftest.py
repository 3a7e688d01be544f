"""Shared fixtures of the tests of checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """100 questions with answers."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": "yes"}) + "\n" for n in range(100)))
    return file
