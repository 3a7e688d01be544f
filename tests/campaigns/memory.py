"""A file is published to S3 and fetched, in a process that measures its own peak of resident memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from alignment_core.artifacts import open_store
from tests.campaigns.places import Outcome, Place
from tests.processes import ended, in_child

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
                told = place.folder / f"told-{files}"
                assert ended(in_child(lambda: _measure(place, count * 10**6, files, told))) == 0  # noqa: B023
                peaks[files] = int(told.read_text()) / 1000
        server.terminate()
    figures = {"campaign": "memory", "store": place.kind, "seed": seed, "of": count}
    figures |= {f"peak resident MB, in {files} files": round(peak) for files, peak in peaks.items()}
    return Outcome(json.dumps(figures | {"goal": f"less than {_LIMIT}"}), max(peaks.values()) < _LIMIT)


def _measure(place: Place, size: int, files: int, told: Path) -> None:
    source = place.folder / f"source-{files}"
    source.mkdir()
    for number in range(files):
        with (source / f"weights-{number}").open("wb") as file:
            file.truncate(size // files + number)
    store = open_store(f"s3://bucket/memory-{files}")
    fetched = store.fetch(store.publish(source, "model"))
    sizes = [(fetched / f"weights-{number}").stat().st_size for number in range(files)]
    assert sizes == [size // files + number for number in range(files)]
    store.workspace.discard(fetched)
    told.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
