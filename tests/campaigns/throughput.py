"""The same files through the store and through plain s3fs, to the same server in turn: seconds of s3fs over ours, with all our
hashing; and likewise the store with s3fs' ``call_s3`` in place of its own client. Each side is a separate process."""

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
SIDES = ("store", "call_s3", "s3fs")
_GOAL = 0.9
_FILES = {"large": (3, 96 << 20), "small": (300, 4 << 10)}
"""How many, and bytes of each."""


def run(place: Place, count: int, seed: int) -> Outcome:
    rng, seconds = random.Random(seed), dict[tuple[str, str, str], float]()
    for number in range(count):
        for files, (many, size) in _FILES.items():
            source = place.write({f"part-{n}": rng.randbytes(size) for n in range(many)})
            for side in SIDES if number % 2 else SIDES[::-1]:
                to = place.folder / "fetched" / f"{side}-{number}-{files}"
                for direction, took in _one(side, source, to, f"{side}-{number}-{files}").items():
                    seconds[side, files, direction] = min(took, seconds.get((side, files, direction), took))
                shutil.rmtree(to, ignore_errors=True)
            shutil.rmtree(source)

    def ratios(side: str) -> dict[str, float]:
        both = ((files, direction) for files in _FILES for direction in ("publish", "fetch"))
        return {
            f"{direction} {files}": round(seconds[side, files, direction] / seconds["store", files, direction], 2)
            for files, direction in both
        }

    figures = {"campaign": "throughput", "store": place.kind, "seed": seed, "of": count, **ratios("s3fs")}
    figures |= {"with call_s3": ratios("call_s3"), "goal": f"at least {_GOAL}"}
    return Outcome(json.dumps(figures), min(ratios("s3fs").values()) >= _GOAL)


def _one(side: str, source: Path, to: Path, prefix: str) -> dict[str, float]:
    """Seconds of each direction."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.throughput_side", side, str(source), str(to), prefix],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds
