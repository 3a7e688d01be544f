"""When Ray's own daemons die, or a wait passes its deadline, the whole host ends at once and the next call has a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.errors import DeadlineExceeded, InfrastructureError
from alignment_core.host.client import Host
from alignment_core.recipes import ResourcesConfig
from tests.host.training_call import training_call
from tests.processes import processes_of

pytestmark = pytest.mark.slow

STEPS = 200


class Killer:
    """A progress callback that kills the daemon ``name`` of the host's Ray, once, when training is under way."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name, self.killed = home, name, False

    def __call__(self, message: dict[str, Any]) -> None:
        if not self.killed and message["done"] >= 3:
            self.killed = True
            (daemon,) = (pid for pid in processes_of(self.home) if psutil.Process(pid).name() == self.name)
            psutil.Process(daemon).kill()


def test_training_goes_on_in_a_new_host_after_the_death_of_gcs_and_of_raylet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    resources = ResourcesConfig(trainers=1, zero_stage=0, progress_seconds=1e-9)
    with Host(str(tmp_path / "store"), resources, tmp_path / "host.log") as host:
        call = training_call(host, STEPS)
        for daemon in ("gcs_server", "raylet"):
            with pytest.raises(InfrastructureError, match=r"sft: the run host died; see .*host\.log") as caught:
                host.run(call, Killer(home, daemon))
            assert caught.value.retryable
            assert f"Ray's {daemon} died" in (tmp_path / "host.log").read_text()
        result = host.run(call)
    assert result.metrics["steps"] == STEPS
    assert result.cost["train_steps"] < STEPS, "the steps before the deaths were not lost"


def test_a_wait_that_passes_its_deadline_ends_the_host_and_says_which_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    hurried = ResourcesConfig(trainers=1, zero_stage=0, wait_timeout_seconds=0.01)
    says = r"^sft: 1 of 1 trainers did not answer `\w+` within 0\.01 seconds \(resources\.wait_timeout_seconds\)$"
    with Host(str(tmp_path / "store"), hurried, tmp_path / "host.log") as host:
        call = training_call(host, STEPS)
        with pytest.raises(DeadlineExceeded, match=says):
            host.run(call)
        assert processes_of(home) == {}, "nothing that hangs is left when the next attempt begins"
