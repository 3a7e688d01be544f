"""Seconds of the store for a large file: to publish it, to fetch its blob into the cache, and to compute its digest."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from alignment_core.artifacts import FolderBackend, open_store
from alignment_core.artifacts.paths import blob_path
from alignment_core.canonical import digest_of_file

MIB = 500
TIMES = 5


def main() -> None:
    """Seconds of the fastest of five. In the current folder, whose file system and user decide whether blobs are copied."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as place:
        model, store = Path(place) / "model", Path(place) / "store"
        model.mkdir()
        durations: dict[str, list[float]] = {"publish": [], "into_cache": [], "digest": []}
        for number in range(TIMES):
            (model / "weights").write_bytes(os.urandom(MIB << 20))
            times = [time.perf_counter()]
            (entry,) = open_store(store).manifest(open_store(store).publish(model, "model")).files
            times.append(time.perf_counter())
            FolderBackend(store).download(blob_path(entry.sha256), Path(place) / f"cached-{number}")
            times.append(time.perf_counter())
            digest_of_file(Path(place) / f"cached-{number}")
            times.append(time.perf_counter())
            for name, before, after in zip(durations, times, times[1:], strict=False):
                durations[name].append(after - before)
            (Path(place) / f"cached-{number}").unlink()
    print(json.dumps({"mib": MIB, **{name: round(min(seconds), 2) for name, seconds in durations.items()}}))


if __name__ == "__main__":
    main()
