"""One side of the campaign ``throughput``: sends a folder to S3 and fetches it, and prints the seconds of both."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def through_store(source: Path, to: Path, prefix: str) -> tuple[Callable[[], object], Callable[[], object]]:
    from alignment_core.artifacts import Store, open_store
    from alignment_core.artifacts.workspace import Workspace

    store = Store(open_store(f"s3://bucket/{prefix}").backend, Workspace(to))
    made = []
    return lambda: made.append(store.publish(source, "model")), lambda: store.fetch(made[0])


def through_s3fs(source: Path, to: Path, prefix: str) -> tuple[Callable[[], object], Callable[[], object]]:
    from s3fs import S3FileSystem

    files = S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    files.exists(f"bucket/{prefix}")  # connects
    return (
        lambda: files.put(f"{source}/", f"bucket/{prefix}/", recursive=True),
        lambda: files.get(f"bucket/{prefix}/", f"{to}/", recursive=True),
    )


def main() -> None:
    side, source, to, prefix = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    works = (through_store if side == "store" else through_s3fs)(source, to, prefix)
    seconds = {}
    for what, work in zip(("publish", "fetch"), works, strict=True):
        began = time.perf_counter()
        work()
        seconds[what] = time.perf_counter() - began
    sizes = sorted(file.stat().st_size for file in source.rglob("*"))
    assert sorted(file.stat().st_size for file in to.rglob("part-*")) == sizes
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
