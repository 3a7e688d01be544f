"""The quickstart with everything cached, in a folder and in S3 with 20 ms per request: the cost of latency."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alignment_core.artifacts import open_store
from alignment_core.artifacts.paths import BLOBS, MANIFESTS, STAGES, TAGS, USES
from tests.servers.faulty import Faulty
from tests.servers.s3 import S3Server

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"
LATENCY = 0.02
TIMES = 4


def run(store: str) -> dict[str, float]:
    """Seconds of the command, and processor seconds including its children."""
    began, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(RECIPE), "--store", store]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return {"seconds": time.monotonic() - began, "processor_seconds": sum(after[2:4]) - sum(before[2:4])}


def copy(here: str, there: str) -> None:
    """The store's objects as they are, so that both hold the same."""
    source, target = open_store(here).backend, open_store(there).backend

    def put(path: str) -> None:
        target.put(path, source.read(path))

    paths = [entry.path for prefix in (BLOBS, MANIFESTS, STAGES, TAGS, USES) for entry in source.list(prefix)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, paths))


def main() -> None:
    """In turn, so that other load affects both equally; the first runs, which fill caches, do not count.

    With ``BENCH_STORE``, a folder store in which the quickstart has run, it does not run first.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        os.environ["ALIGN_HOME"] = f"{place}/home"
        folder = os.environ.get("BENCH_STORE") or f"{place}/store"
        run(folder)
        server = S3Server(Path(place) / "s3").start()
        try:
            os.environ |= server.environment()
            server.make_bucket("bench")
            bucket = "s3://bench/store"
            copy(folder, bucket)
            with Faulty(server.url, latency=LATENCY) as proxy:
                os.environ["AWS_ENDPOINT_URL"] = proxy.url
                seconds: dict[str, list[dict[str, float]]] = {folder: [], bucket: []}
                for _ in range(TIMES):
                    for store, costs in seconds.items():
                        proxy.requests.clear()
                        costs.append(run(store))
                requests = len(proxy.requests)
            for name, store in (("folder", folder), ("s3", bucket)):
                least = {part: round(min(lap[part] for lap in seconds[store][1:]), 2) for part in seconds[store][0]}
                print(json.dumps({"store": name, **least}), flush=True)
            added = [there["seconds"] - here["seconds"] for here, there in zip(*seconds.values(), strict=True)][1:]
            print(
                json.dumps({"requests": requests, "added, seconds": [round(duration, 2) for duration in added]}),
                flush=True,
            )
        finally:
            server.end()


if __name__ == "__main__":
    main()
