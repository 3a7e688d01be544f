"""An actor that is forked from a preloaded process lives as long as the launcher that Ray knows, and is found by its home."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.host.idle_flow import start_idle_flow
from tests.processes import processes_of, role_of, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("ALIGN_TESTS_PRELOADED") == "0", reason="ALIGN_TESTS_PRELOADED=0: actors import for themselves"
    ),
]


@pytest.mark.parametrize("killed", ["fork", "launcher"])
def test_the_fork_and_its_launcher_end_together(killed: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    flow, home = start_idle_flow(tmp_path, tiny_model())
    try:
        lines = processes_of(home)
        (fork,) = [pid for pid, line in lines.items() if role_of(line) == "actor"]
        (launcher,) = [pid for pid, line in lines.items() if "preloaded/launch.py" in line]
        of_both = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in (fork, launcher)]
        assert {line for line in of_both[1] if line} <= set(of_both[0])

        os.kill({"fork": fork, "launcher": launcher}[killed], signal.SIGKILL)
        assert wait_until(lambda: not {fork, launcher} & processes_of(home).keys(), 60), processes_of(home)
    finally:
        flow.send_signal(signal.SIGINT)
        flow.wait(60)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
