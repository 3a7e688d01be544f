"""The whole graph, in another process and another store: the same digests of everything that is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.align import Align, references
from tests.flows.test_quickstart import run_small

pytestmark = pytest.mark.slow


def test_another_process_with_another_store_makes_the_same_digests(align: Align, tmp_path: Path) -> None:
    first, second = (references(run_small(align, tmp_path / name)) for name in ("one", "other"))
    assert {"sft", "reward-model", "round-1/dpo", "round-2/dpo", "round-2/evaluation"} <= first.keys()
    assert first == second
