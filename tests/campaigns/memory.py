"""A file is published to S3 and fetched, in a process that measures its peak resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from alignment_core.artifacts import open_store
from tests.campaigns.places import Outcome, Place

COUNT, STORES = 5_000, ("s3",)
"""Megabytes of the file."""
_LIMIT = 1_000
_FILES = 8


def run(place: Place, count: int, seed: int) -> Outcome:
    """The server is one that keeps no large bodies; the file has holes, so that it takes room only when it is fetched."""
    command = [sys.executable, "-m", "tests.servers.bottomless"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with patch.dict(os.environ, {"AWS_ENDPOINT_URL": server.stdout.readline().strip()}):
            peaks = {}
            for files in (1, _FILES):  # one large file, and as much in several at once
                command = [
                    sys.executable,
                    "-m",
                    "tests.campaigns.memory",
                    str(place.folder),
                    str(count * 10**6),
                    str(files),
                ]
                peaks[files] = int(subprocess.check_output(command)) / 1000
        server.terminate()
    figures = {"campaign": "memory", "store": place.kind, "seed": seed, "of": count}
    figures |= {f"peak resident MB, in {files} files": round(peak) for files, peak in peaks.items()}
    return Outcome(json.dumps(figures | {"goal": f"less than {_LIMIT}"}), max(peaks.values()) < _LIMIT)


def main() -> None:
    folder, size, files = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    source = folder / f"source-{files}"
    source.mkdir()
    for number in range(files):
        with (source / f"weights-{number}").open("wb") as file:
            file.truncate(size // files + number)
    store = open_store(f"s3://bucket/memory-{files}")
    fetched = store.fetch(store.publish(source, "model"))
    sizes = [(fetched / f"weights-{number}").stat().st_size for number in range(files)]
    assert sizes == [size // files + number for number in range(files)]
    store.workspace.discard(fetched)
    status = Path("/proc/self/status").read_text()  # getrusage counts the process that this one was started by, too
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


if __name__ == "__main__":
    main()
