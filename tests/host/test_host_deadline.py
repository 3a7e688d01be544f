"""When a wait passes its deadline, the whole host ends at once and the next call has a new one.

Deaths of its daemons are in tests/long/test_daemon_deaths.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.errors import DeadlineExceeded
from alignment_core.host.client import Host
from alignment_core.recipes import ResourcesConfig
from tests.conftest import TinyModel
from tests.host.training_call import training_call
from tests.preloaded import JOB_CONFIG
from tests.processes import processes_of

pytestmark = pytest.mark.slow


def test_a_wait_past_its_deadline_ends_the_host_and_is_named(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    monkeypatch.delenv(JOB_CONFIG, raising=False)  # a fork ends a moment after its launcher
    hurried = ResourcesConfig(trainers=1, zero_stage=0, wait_timeout_seconds=0.01, no_progress_timeout_seconds=600)
    says = r"^sft: 1 of 1 trainers did not answer `\w+` within 0\.01 seconds \(resources\.wait_timeout_seconds\)$"
    with Host(str(tmp_path / "store"), hurried, tmp_path / "host.log") as host:
        call = training_call(host, tiny_model(), 5)
        with pytest.raises(DeadlineExceeded, match=says):
            host.run(call)
        assert processes_of(home) == {}, "nothing that hangs is left when the next attempt begins"
