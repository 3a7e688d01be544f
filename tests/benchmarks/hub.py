"""Publishing to a store on the Hub and fetching from it, against plain ``huggingface_hub`` on the same server of loopback."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.processes import ended, in_child
from tests.servers.hub import HubServer

FILES, MIB = 8, 32
TIMES = 5


def main() -> None:
    """Seconds of the fastest of five, in turns. Ours hash all bytes on both ways; theirs on the way up, as LFS wants it.

    In the current folder, whose file system has to persist uploads before the server answers.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as place:
        sys.exit(ended(in_child(lambda: measure(Path(place).resolve()))))  # which leaves nothing in its ALIGN_HOME


def measure(root: Path) -> None:
    server = HubServer(root / "server").start()
    os.environ |= server.environment() | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(root / "hf")}
    try:
        laps = [lap(root / f"lap-{number}", server) for number in range(TIMES)]
    finally:
        server.end()
    best = {name: round(min(seconds[name] for seconds in laps), 2) for name in laps[0]}
    ratios = {way: round(best[f"{way}_plain"] / best[way], 2) for way in ("publish", "fetch")}
    print(json.dumps({"mib": FILES * MIB, "files": FILES, **best, "ratios": ratios}), flush=True)


def lap(root: Path, server: HubServer) -> dict[str, float]:
    """Publish and fetch new bytes once each way: seconds, and how many commits ours took."""
    from huggingface_hub import HfApi  # reads the environment when it is imported

    from alignment_core.artifacts import open_store

    api, model, plain, seconds = HfApi(), root / "model", f"org/plain-{root.name}", dict[str, float]()
    model.mkdir(parents=True)
    for number in range(FILES):
        (model / f"part-{number}").write_bytes(os.urandom(MIB << 20))

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - began

    api.create_repo(plain, repo_type="dataset", private=True)
    os.environ["ALIGN_HOME"] = str(root / "mine")
    mine = open_store(f"hf://org/store-{root.name}")
    timed("publish_plain", lambda: api.upload_folder(folder_path=model, repo_id=plain, repo_type="dataset"))
    before = len(server.commits("dataset", f"org/store-{root.name}"))
    timed("publish", lambda: mine.publish(model, "model"))
    seconds["commits"] = len(server.commits("dataset", f"org/store-{root.name}")) - before
    os.environ["ALIGN_HOME"] = str(root / "theirs")
    theirs = open_store(mine.uri, writes=False)
    (reference,) = [artifact.reference for artifact in theirs.artifacts()]
    timed("fetch_plain", lambda: api.snapshot_download(plain, repo_type="dataset", local_dir=root / "downloaded"))
    timed("fetch", lambda: theirs.fetch(reference))
    shutil.rmtree(root, ignore_errors=True)
    return seconds


if __name__ == "__main__":
    main()
