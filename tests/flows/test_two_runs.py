"""Two concurrent runs of a recipe: shared stages are computed once, and the queue for the machine is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.access import TOKEN, URL
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import RunName, Ticket
from tests.conftest import TinyModel
from tests.flows.test_processes import RECIPE, wait_until

pytestmark = pytest.mark.slow

Messages = Callable[[], list[str]]


@pytest.fixture
def home(tmp_path: Path, prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ALIGN_HOME, and actors that say something although they are healthy: OpenMP shows its settings when it starts."""
    home = tmp_path / "home"
    for name, value in {**prefect_api, "ALIGN_HOME": str(home), "OMP_DISPLAY_ENV": "true"}.items():
        monkeypatch.setenv(name, value)
    return home


@pytest.fixture
def messages(home: Path, prefect_api: dict[str, str]) -> Messages:
    """The logs of this home's runs in Prefect's API."""
    token = b64encode(prefect_api[TOKEN].encode()).decode()
    headers = {"authorization": f"Basic {token}", "content-type": "application/json"}

    def read() -> list[str]:
        messages: list[str] = []
        while True:
            runs = [path.name for path in (home / "runs").glob("*")]
            query = {"offset": len(messages), "sort": "TIMESTAMP_ASC", "logs": {"flow_run_id": {"any_": runs}}}
            request = urllib.request.Request(f"{prefect_api[URL]}/logs/filter", json.dumps(query).encode(), headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                page = json.loads(answer.read())
            messages += [log["message"] for log in page]
            if not page:
                return messages

    return read


def outcome_of(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    assert "waits for" not in err, "the console stays quiet"
    return json.loads(out.splitlines()[-1])


def test_two_runs_at_once_queue_visibly_and_compute_each_stage_once(
    home: Path, messages: Messages, tmp_path: Path, tiny_model: TinyModel
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE.format(model=tiny_model()))
    align = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(recipe), "--json"]
    me = Ticket(label="a test", run=RunName("0123456789", "other"))
    with MachineQueue(home / "locks").use(me):
        runs = [
            subprocess.Popen(align, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
            for _ in range(2)
        ]

        def both_wait() -> bool:
            lines = messages()
            return all(any(reason in line for line in lines) for reason in reasons)

        reasons = [
            "sft waits for the machine: run 01234567 (other) uses it for a test",
            "sft waits for the same stage in run ",
        ]
        try:
            assert wait_until(both_wait, 240), messages()
            status = subprocess.run([*align[:3], "status"], capture_output=True, text=True, timeout=60).stdout
            assert len(re.findall(r"sft: has waited \d+ s for the (machine|same stage)", status)) == 2, status
        except BaseException:
            for run in runs:
                run.kill()
            raise
    outcomes = [outcome_of(run) for run in runs]

    keys = [{stage["label"]: (stage["key"], stage["reference"]) for stage in outcome["stages"]} for outcome in outcomes]
    assert keys[0] == keys[1]
    for label in keys[0]:
        states = {stage["state"] for outcome in outcomes for stage in outcome["stages"] if stage["label"] == label}
        assert states == {"run", "cached"}, f"{label} was computed by one of them"

    log_lines = messages()
    assert any(line.startswith("sft trainers[0]: ") and "OPENMP" in line for line in log_lines), log_lines
    assert "sft continues" in log_lines
    assert not [line for line in log_lines if "Error" in line]

    for outcome in outcomes:
        ran = [stage["cost"] for stage in outcome["stages"] if stage["state"] == "run"]
        assert outcome["cost"]["seconds"] == pytest.approx(sum(cost["seconds"] for cost in ran), abs=0.01)
    stages = {
        stage["label"]: stage["cost"] for outcome in outcomes for stage in outcome["stages"] if stage["state"] == "run"
    }
    assert stages["sft"]["waited_seconds"] > 0
    assert stages["sft"]["device_seconds"] > 0
    assert stages["sft"]["train_tokens"] >= stages["sft"]["train_computed_tokens"] > 0
    assert stages["sft"]["train_processor_seconds"] > 0
    assert stages["start/evaluation/generate"]["completion_tokens"] > 0
    assert stages["start/evaluation/generate"]["generate_processor_seconds"] > 0
    assert stages["start/evaluation/generate"]["prompt_tokens"] > 0
    assert stages["sft/evaluation/score"]["score_tokens"] > 0
    assert stages["report"]["device_seconds"] == 0
