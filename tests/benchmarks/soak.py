"""Fifty short runs in a row on one server: do memory, open files, threads and disk of the long-lived processes stay flat?

Exit code 1 if one grows by more than the bounds below from the second fifth of the runs to the last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from tests.deployments.up import Services

RUNS = int(os.environ.get("SOAK_RUNS", "50"))
OVERRIDES = [
    "model={scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}",
    "sft={data: {task: reverse, rows: 64}, training: {batch_size: 32}}",
    "evaluation=null",
    "promotion=null",
    "resources={trainers: 1, engines: 1}",
]
BOUNDS = {"memory_mib": 30.0, "files": 5.0, "threads": 5.0}
NAMES = ("server", "worker", "reconciler")


def measure(services: Services, daemon: int) -> dict[str, dict[str, float]]:
    """Figures of each long-lived process, and of the disk below ALIGN_HOME."""
    pids = {"services": daemon, **{name: services.pid(name) for name in NAMES}}
    figures = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        figures[name] = {
            "memory_mib": process.memory_full_info().uss / 2**20,
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }
    sizes = [path.lstat().st_size for path in services.home.rglob("*") if path.is_file()]
    figures["home"] = {"disk_mib": sum(sizes) / 2**20, "entries": float(len(sizes))}
    return figures


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["ALIGN_HOME"] = str(home)
    services = Services(home)
    samples, seconds = [], []
    daemon = services.align("up", "--port", str(services.port))["pid"]
    try:
        for _ in range(RUNS):
            began = time.monotonic()
            run_id = services.start_run(OVERRIDES)
            while services.state(run_id) not in ("Completed", "Failed", "Crashed"):
                time.sleep(0.5)
            assert services.state(run_id) == "Completed", services.states(run_id)
            seconds.append(time.monotonic() - began)
            samples.append(measure(services, daemon))
    finally:
        services.align("down")
    fifth = max(1, RUNS // 5)
    grown = []
    for process, figures in samples[0].items():
        for figure in figures:
            before = median(sample[process][figure] for sample in samples[fifth : 2 * fifth])
            after = median(sample[process][figure] for sample in samples[-fifth:])
            line = {"process": process, "figure": figure, "before": round(before, 1), "after": round(after, 1)}
            print(json.dumps(line), flush=True)
            if after - before > BOUNDS.get(figure, float("inf")):
                grown.append(f"{process} {figure}")
    print(json.dumps({"runs": RUNS, "seconds_per_run": round(median(seconds), 1), "grown": grown}), flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
