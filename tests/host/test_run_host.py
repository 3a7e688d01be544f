"""The run host: stages run in it, errors come back typed, and nothing of it outlives the process that asked."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from alignment_core.artifacts import open_store
from alignment_core.errors import DeadlineExceeded, Stopped, UserError
from alignment_core.execution.base import StageCall
from alignment_core.host.client import Host
from alignment_core.recipes import ModelConfig, ResourcesConfig, ScratchModel
from alignment_core.stages.base_model import BaseModelConfig, pin_model
from tests.processes import processes_of

pytestmark = pytest.mark.slow

TINY = ModelConfig(
    scratch=ScratchModel(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
)
FLOW = """
import sys, time
from pathlib import Path
from alignment_core.host.client import Host
from alignment_core.recipes import ModelConfig, ResourcesConfig, ScratchModel
from alignment_core.execution.base import StageCall
from alignment_core.stages.base_model import pin_model
shape = ScratchModel(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
config = pin_model(ModelConfig(scratch=shape)).model_dump(mode="json")
host = Host(sys.argv[1], ResourcesConfig(trainers=1), Path(sys.argv[1] + ".log"))
host.run(StageCall(stage="base_model", label="model", config=config, inputs={}))
print("ready", flush=True)
time.sleep(600)
"""


def model_call(config: BaseModelConfig | None = None) -> StageCall:
    chosen = config or pin_model(TINY)
    return StageCall(stage="base_model", label="model", config=chosen.model_dump(mode="json"), inputs={})


def test_nothing_outlives_the_process_that_asked(tmp_path: Path) -> None:
    """Ended by Ctrl-C; tests/host/test_stopping.py ends it by SIGKILL and by SIGTERM, while it trains."""
    home = tmp_path / "home"
    flow = subprocess.Popen(
        [sys.executable, "-c", FLOW, str(tmp_path / "store")],
        env={**os.environ, "ALIGN_HOME": str(home), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "flow.err").open("wb"),
    )
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"ready\n"
    there = processes_of(home)
    assert len(there) > 5, "supervisor, host, Ray's daemons and a trainer should be there"
    raylet = next(psutil.Process(pid) for pid, line in there.items() if "raylet" in line.split()[0])
    token = Path(raylet.environ()["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert not (tmp_path / ".ray").exists(), "where Ray keeps a token that all can read"
    flow.send_signal(signal.SIGINT)
    flow.wait(30)
    deadline = time.monotonic() + 30
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(home) == {}
    assert not token.exists()


def test_calls_errors_deadlines_and_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    store = open_store(tmp_path / "store")
    host = Host(store.uri, ResourcesConfig(trainers=1), tmp_path / "host.log")

    made = host.run(model_call())
    assert made.state == "run"
    assert made.reason == "first run of this stage in this store"
    assert (store.fetch(made.reference) / "model.safetensors").is_file()

    again = host.run(model_call())
    assert (again.state, again.reference) == ("cached", made.reference)

    empty = tmp_path / "no-weights"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no \*\.safetensors"):
        host.run(model_call(pin_model(ModelConfig(name=str(empty)))))

    hurried = Host(store.uri, ResourcesConfig(trainers=1, stage_timeout_seconds=0.01), tmp_path / "hurried.log")
    other = ScratchModel(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(DeadlineExceeded, match=r"model took longer than its 0\.01 seconds"):
        hurried.run(model_call(pin_model(ModelConfig(scratch=other))))
    hurried.close()

    host.close()
    with pytest.raises(Stopped):
        host.run(model_call(pin_model(ModelConfig(scratch=other))))
    assert not list((tmp_path / "home").glob("tmp/*"))
