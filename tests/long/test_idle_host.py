"""A flow that is killed while nothing runs leaves no process."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.conftest import TinyModel
from tests.host.idle_flow import check_that_nothing_outlives


def test_nothing_outlives_a_flow_that_is_killed(tmp_path: Path, tiny_model: TinyModel) -> None:
    check_that_nothing_outlives(signal.SIGKILL, tmp_path, tiny_model())
