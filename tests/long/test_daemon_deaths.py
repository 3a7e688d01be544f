"""When Ray's own daemons die, the whole host ends at once, and the next call continues in a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.errors import InfrastructureError
from alignment_core.host.client import Host
from alignment_core.recipes import ResourcesConfig
from tests.conftest import TinyModel
from tests.host.training_call import training_call
from tests.processes import processes_of, role_of, wait_until

STEPS = 500
"""So many that the first second of them, after which the first process is killed, is not all."""


class Killer:
    """A progress callback that kills a process of this role, once, when training is under way."""

    def __init__(self, home: Path, role: str) -> None:
        self.home, self.role, self.killed = home, role, False

    def __call__(self, message: dict[str, Any]) -> None:
        if not self.killed and message["done"] >= 3:
            self.killed = True
            pids = [pid for pid, line in processes_of(self.home).items() if role_of(line) == self.role]
            psutil.Process(pids[0]).kill()


def test_training_continues_in_a_new_host_after_the_death_of_a_required_process(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its actors others tell: tests/execution/test_failures.py and tests/stages/test_rl.py."""
    home = tmp_path / "home"
    monkeypatch.setenv("ALIGN_HOME", str(home))
    resources = ResourcesConfig(trainers=1, zero_stage=0, progress_seconds=1e-9)
    with Host(str(tmp_path / "store"), resources, tmp_path / "host.log") as host:
        call = training_call(host, tiny_model(), STEPS)
        for role, says in {"gcs": "Ray's gcs_server died", "raylet": "Ray's raylet died", "host": ""}.items():
            with pytest.raises(InfrastructureError, match=r"sft: the run host died \(.*\); see .*host\.log") as caught:
                host.run(call, Killer(home, role))
            assert caught.value.retryable
            assert says in (tmp_path / "host.log").read_text()
        try:
            killed = host.run(call, Killer(home, "supervisor"))
        except InfrastructureError:  # the host may continue without it
            killed = host.run(call)
        assert killed.metrics["steps"] == STEPS
        assert killed.cost["train_steps"] < STEPS, "the steps before the deaths were not lost"
        whole = host.run(call.model_copy(update={"rerun": "undisturbed"}))
        assert (whole.cost["train_steps"], whole.reference) == (STEPS, killed.reference)
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
