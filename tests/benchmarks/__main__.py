"""``make bench``: speed as ratios against a reference in the same run; prints one JSON object a line.

``python -m tests.benchmarks figures`` measures the tables of docs/performance.md instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

from tests.benchmarks import figures
from tests.benchmarks.peers import MISSING

PARTS = (
    *("startup", "store", "training", "prefixes", "generation", "rewards", "step_data", "reinforcement", "peers"),
    "pipeline",
)
ON_REQUEST = (
    "hub",
    "soak",
    "index",
    "cached",
    "sweep",
    "weight_update",
    "channels",
    "deltas",
    "startup_real",
    "endings",
    "recipes",
    "real",
    "ui",
    "capacity",
    "driver",
    "head",
)
"""Parts that take long: `python -m tests.benchmarks soak`."""
TAKES_ARGUMENTS = {"real", "recipes"}
WITH_OWN_ENVIRONMENT = {"startup", "store", "pipeline", *ON_REQUEST} - {"real"}
CPU = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> int:
    """Run each part in a separate process; the exit code is that of the first failure."""
    wanted = sys.argv[1:] or list(PARTS)
    if wanted[0] == "figures":
        return figures.main(wanted[1:])
    arguments: list[str] = []
    if wanted[0] in TAKES_ARGUMENTS:
        wanted, arguments = wanted[:1], wanted[1:]
    for part in wanted:
        if part == "peers" and not sys.argv[1:] and find_spec("trl") is None:
            print(f"peers: skipped, because {MISSING}", file=sys.stderr)
            continue
        environment = {**os.environ, **({} if part in WITH_OWN_ENVIRONMENT else CPU)}
        done = subprocess.run(
            [sys.executable, "-m", f"tests.benchmarks.{part}", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                print(json.dumps({"part": part, **json.loads(line)}), flush=True)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
