"""Runs that share a Ray cluster or a machine: waiting for GPUs, ending actors, and a dying actor's last output in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.host.logs import LogTail

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, threading, time
from pathlib import Path
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Place
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import InfrastructureError
from tests.cluster.visible import Mortal

ray_cluster.prepare_environment()
import ray
ray.init(num_gpus=2, num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1",
         object_store_memory=100 << 20, log_to_driver=True, configure_logging=False)

first, reasons = ray_cluster.reserve_gpus(ray, 2), []
def waits(reason):
    reasons.append(reason)
    if reason:
        ray.util.remove_placement_group(first)
second = ray_cluster.reserve_gpus(ray, 1, waits)

print("[align] trainers serve sft", flush=True)
group = ActorGroup(ray, "trainers", [Place(), Place()], [{}, {}], 60)
group.make("tests.cluster.visible:Mortal", [{}, {}])
group.all(Mortal.speak)

def hear(words, times):
    deadline = time.monotonic() + 60
    while Path(sys.argv[3]).read_text().count(words) < times and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray brings what actors print when it finds the time

hear("I speak", 2)
before = ray_cluster.actor_processes()
try:
    group.one(1, Mortal.die)
except InfrastructureError:
    hear("Fatal Python error: Aborted", 1)  # the host gives it a second
group.kill()
ray_cluster.wait_until_ended(before)
after = ray_cluster.actor_processes()
Path(sys.argv[2]).write_text(json.dumps({"reasons": reasons, "before": len(before), "after": len(after)}))
ray.shutdown()
"""


@pytest.mark.slow
def test_waiting_for_gpus_ending_actors_and_their_last_output(short_folder: Path, tmp_path: Path) -> None:
    """One Ray for three questions, because it takes seconds to start. The GPUs are only numbers, without a driver."""
    log, answers = tmp_path / "run.log", tmp_path / "answers.json"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(short_folder), str(answers), str(log)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # for the actors, which make an object of this folder
            cwd=ROOT,
            stdout=output,
            stderr=output,
            timeout=120,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    result = json.loads(answers.read_text())
    first, *between, last = result["reasons"]
    assert (first, last) == ("1 GPUs of the Ray cluster: 0 of 2 are free", None)
    assert {*between} <= {first.replace("0 of", "1 of"), first.replace("0 of", "2 of")}, (
        "Ray gives them back one by one"
    )
    assert (result["before"], result["after"]) == (2, 0)

    received: list[tuple[str | None, str, str]] = []
    LogTail(log, 0, lambda *line: received.append(line)).close()
    text = {origin: text for stage, origin, text in received if stage == "sft"}
    assert text["trainers[0]"] == "I speak"
    assert "I speak" in "\n".join(text for stage, origin, text in received if (stage, origin) == ("sft", "trainers[1]"))
    assert "Fatal Python error: Aborted" in log.read_text()
    assert [origin for _, origin, text in received if "Fatal Python error: Aborted" in text] == ["trainers[1]"]
