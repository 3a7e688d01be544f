"""No process sends data that the user's variables forbid to send.

The variables are those of the libraries' own documentation. Servers on loopback, in place of
W&B's and the Hub's, count the requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.service.services import environment
from alignment_core.cluster.device import Device, Place
from alignment_core.host.client import _environment
from alignment_core.processes import inherited
from alignment_core.recipes import ResourcesConfig
from tests.answering import answering
from tests.tracking.test_wandb import Place as WandbPlace
from tests.tracking.test_wandb import points

ROOT = Path(__file__).parents[1]
FORBIDDING = {
    "WANDB_MODE": "offline",
    "WANDB_DISABLED": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
}
FIND = """
from alignment_core import network
network.prepare()
from alignment_core.data.hub import commit_of
for kind in ("model", "dataset"):
    try:
        commit_of("org/name", None, kind)
    except Exception as error:
        print(kind, error)
"""


@pytest.mark.parametrize("name", FORBIDDING)
def test_every_started_process_inherits_the_variables_that_forbid_sending(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the run host, and so of Ray's daemons and actors; of actors' own variables; of the user's code and trackers, which
    have those of ``inherited``; of Prefect's server, worker and the flows that it starts."""
    value = FORBIDDING[name]
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    monkeypatch.setenv(name, value)
    resources = ResourcesConfig()
    for environ in (inherited(), _environment(resources, tmp_path), environment(4200)):
        assert environ[name] == value
    for kind in ("cpu", "cuda"):
        device: Any = Device(kind, 1, private=True)
        for changes in (device.trainer_environment(resources, 1), device.engine_environment(resources, Place())):
            assert changes.get(name, value) == value


@pytest.mark.parametrize(
    ("variables", "requests"),
    [({}, ["models", "datasets"]), ({"HF_DATASETS_OFFLINE": "1"}, ["models"]), ({"HF_HUB_OFFLINE": "1"}, [])],
)
def test_only_named_repositories_are_requested_from_the_hub_and_none_offline(
    variables: dict[str, str], requests: list[str], tmp_path: Path
) -> None:
    """Unless tracking is forbidden, the Hub's client also fetches a list of agents, `/api/agent-harnesses`."""
    with answering(404) as (port, paths):
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", FIND]
        done = subprocess.run(
            command, env={**os.environ, **place, **variables}, capture_output=True, text=True, timeout=120
        )
    assert [path.split("/")[2] for path in paths] == requests, done.stdout + done.stderr
    for name in variables:
        assert f"{name} is set" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "recorded"),
    [
        ({"WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "dryrun"}, True),
        ({"WANDB_MODE": "disabled"}, False),
        ({"WANDB_DISABLED": "true"}, False),
        ({}, True),
    ],
    ids=lambda value: next(iter(value.items()), "") if isinstance(value, dict) else "",
)
def test_the_users_environment_overrides_the_recipe_in_sending_to_wandb(
    variables: dict[str, str], recorded: bool, tmp_path: Path
) -> None:
    """The last case, where nothing forbids it, shows that the server would get requests."""
    place = WandbPlace(tmp_path)
    with answering(404) as (port, paths):
        server = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0123456789" * 4}
        printed = place.run([1, 2], {"mode": "online"}, environment={**server, **variables})
    assert bool(paths) is not bool(variables), (printed, paths)
    assert bool(place.logs()) is recorded
    assert "offline" in printed if recorded else printed.startswith("W&B: is disabled")
    if recorded:
        assert points(place.records(place.logs()[-1])) == [(1, 1.0), (2, 0.5)]


@pytest.mark.slow
def test_wandb_disabled_in_a_folder_stays_disabled(tmp_path: Path) -> None:
    place = WandbPlace(tmp_path)
    (place.work / "wandb").mkdir()
    (place.work / "wandb" / "settings").write_text("[default]\nmode = disabled\n")  # as `wandb disabled` writes it
    with answering(404) as (port, paths):
        server = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0123456789" * 4}
        printed = place.run([1], {"mode": "online"}, environment=server)
    assert (paths, place.logs()) == ([], [])
    assert printed.startswith("W&B: is disabled")
