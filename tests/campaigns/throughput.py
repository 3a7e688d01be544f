"""The same files through the store and through plain s3fs, to the same server in turn: seconds of s3fs over ours, with all our
hashing. Each side is a process of its own."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

from tests.campaigns.places import Outcome, Place

COUNT, STORES = 3, ("s3",)
"""Rounds; of each side's the fastest counts, for others use the machine."""
_GOAL = 0.9
_FILES = {"large": (3, 96 << 20), "small": (300, 4 << 10)}
"""How many, and bytes of each."""


def run(place: Place, count: int, seed: int) -> Outcome:
    rng, seconds = random.Random(seed), dict[tuple[str, str, str], float]()
    for number in range(count):
        for files, (many, size) in _FILES.items():
            source = place.write({f"part-{n}": rng.randbytes(size) for n in range(many)})
            sides = ["store", "s3fs"] if number % 2 else ["s3fs", "store"]
            for side in sides:
                to = place.folder / "fetched" / f"{side}-{number}-{files}"
                for what, took in _one(side, source, to, f"{side}-{number}-{files}").items():
                    seconds[side, files, what] = min(took, seconds.get((side, files, what), took))
                shutil.rmtree(to, ignore_errors=True)
            shutil.rmtree(source)
    ratios = {
        f"{what} {files}": round(seconds["s3fs", files, what] / seconds["store", files, what], 2)
        for files in _FILES
        for what in ("publish", "fetch")
    }
    figures = {"campaign": "throughput", "store": place.kind, "seed": seed, "of": count}
    return Outcome(json.dumps(figures | ratios | {"goal": f"at least {_GOAL}"}), min(ratios.values()) >= _GOAL)


def _one(side: str, source: Path, to: Path, prefix: str) -> dict[str, float]:
    """Seconds of each direction."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.throughput_side", side, str(source), str(to), prefix],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found
