"""A user's functions on a cluster of two nodes: both answer, failures are reported to the driver, and no process stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from alignment_core.cluster import ray_cluster

ray_cluster.prepare_environment()
import ray
from ray.cluster_utils import Cluster

Path(sys.argv[1], "ray").mkdir()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20,
                                                        "include_dashboard": False,
                                                        "node_ip_address": "127.0.0.1"})
cluster.add_node(num_cpus=1, object_store_memory=100 << 20, node_ip_address="127.0.0.1")
ray.init(address=cluster.address)
os.environ["RAY_ADDRESS"] = cluster.address

from alignment_core.execution.machines import WarmMachines
from alignment_core.recipes import ResourcesConfig
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.pool import FunctionPool

machines = WarmMachines(ResourcesConfig(wait_timeout_seconds=120), Path(sys.argv[1]))
pool = FunctionPool(sys.argv[2] + ":meet", 60.0, "rl.rewards.0.function", 2, elsewhere=machines.actors.elsewhere)
answers = dict(pool.answers([[n] for n in range(40)]))
failed = {n: [answer.reason, str(answer)] for n, answer in answers.items() if isinstance(answer, Failed)}
processes = [int(file.stem) for file in Path(sys.argv[2]).parent.glob("*.here")]
again = sorted(dict(pool.answers([[n] for n in range(100, 130)])).values())
pool.close()
deadline = time.monotonic() + 60
while (left := [pid for pid in processes if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
    time.sleep(0.05)
Path(sys.argv[3]).write_text(json.dumps({"right": [answers[n] == n for n in answers if n not in failed], "failed": failed,
                                         "processes": len(processes), "left": left, "again": again}))
"""
FUNCTION = """
import os, time
from pathlib import Path

def meet(x):
    # until four processes have had a call under way, of which one node has only two
    if x == 39:
        raise ValueError("not this one")
    here = Path(__file__).parent
    (here / f"{os.getpid()}.here").touch()
    while len(list(here.glob("*.here"))) < 4:
        time.sleep(0.01)
    return float(x)
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_nodes_answer_and_a_node_ends_with_the_pool(short_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(FUNCTION)
    answers = tmp_path / "answers.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(short_folder), str(tmp_path / "meet.py"), str(answers)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(short_folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(answers.read_text())
    assert result["right"] == [True] * 39
    assert result["failed"]["39"][0] == "raised"
    assert "ValueError: not this one (meet.py, line " in result["failed"]["39"][1]
    assert (result["processes"], result["left"]) == (4, [])
    assert result["again"] == [float(n) for n in range(100, 130)]
