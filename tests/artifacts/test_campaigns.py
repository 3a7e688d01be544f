"""Each campaign against the store in small; ``make campaigns`` has the counts of docs/stores.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.__main__ import run

COUNTS = {
    ("publishers", "folder"): 6,
    ("publishers", "s3"): 4,
    ("acknowledgements", "s3"): 6,
    ("tags", "folder"): 8,
    ("tags", "s3"): 1,
    ("corruption", "folder"): 40,
    ("corruption", "s3"): 8,
    ("gc", "folder"): 1000,
    ("gc", "s3"): 300,
    ("resend", "s3"): 1,
    ("memory", "s3"): 100,
    ("nights", "folder"): 4,
}


@pytest.mark.parametrize(("name", "kind"), COUNTS)
def test_a_small_campaign_reaches_its_goal(name: str, kind: str, tmp_path: Path) -> None:
    done = run(name, kind, COUNTS[name, kind], seed=16, folder=tmp_path / "place")
    assert done.is_met, done.line
