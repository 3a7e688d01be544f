"""What stands for Ray's dashboard agent: it writes what Ray's own writes, and lives as long as the raylet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray._raylet

from alignment_core.cluster.ray_cluster import IDLE_AGENT
from tests.processes import wait_until
from tests.stages.calls import python

RAYLET: Any = ray._raylet
NODE = "54c578e478a36d1044bde0c74cde0d90fc6c40eb9c543e380dce44e5"
PORTS = (RAYLET.METRICS_AGENT_PORT_NAME, RAYLET.METRICS_EXPORT_PORT_NAME, RAYLET.DASHBOARD_AGENT_LISTEN_PORT_NAME)
"""Those for which a raylet waits; Ray's agent gives each the port -1 where nothing is served."""


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_it_reports_no_ports_as_rays_agent_does_and_ends_with_the_raylet(tmp_path: Path) -> None:
    ours, of_ray = tmp_path / "ours", tmp_path / "of-ray"
    for folder in (ours, of_ray):
        folder.mkdir()
    for port in PORTS:
        RAYLET.persist_port(str(of_ray), NODE, port, -1)
    raylet = subprocess.Popen(["sleep", "600"])
    options = [f"--node-id={NODE}", f"--session-dir={ours}", "--logging-format=a=b", "--minimal"]
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", str(IDLE_AGENT), "agent.py", *options],
        env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid)},
    )
    try:
        assert wait_until(lambda: contents(ours) == contents(of_ray), 60), contents(ours)
        assert agent.poll() is None, "a raylet ends with its agent"
    finally:
        raylet.kill()
        raylet.wait()
    assert agent.wait(60) == 0


PRIVATE_RAY = """
import json, os
from pathlib import Path
import psutil
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Place
from alignment_core.cluster.group import ActorGroup
ray = ray_cluster.connect(Path(os.environ["FOLDER"]))
group = ActorGroup(ray, "trainers", [Place()], [{"OURS": "set"}], 60)
group.run_on([0], os.getcwd)
children = psutil.Process().children(recursive=True)
lines = [" ".join(child.cmdline()) for child in children]
ray.shutdown()
left = [child.pid for child in psutil.wait_procs(children, timeout=20)[1]]
print(json.dumps([lines, left]))
"""


@pytest.mark.slow
def test_a_private_ray_has_it_in_place_of_its_own(short_folder: Path) -> None:
    lines, left = python(PRIVATE_RAY, FOLDER=str(short_folder))
    assert [line for line in lines if str(IDLE_AGENT) in line], lines
    assert [line for line in lines if line.startswith("ray::Actor")], lines
    assert not [line for line in lines if line.startswith("ray::DashboardAgent")], lines
    assert left == []
