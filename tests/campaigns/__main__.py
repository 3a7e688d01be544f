"""``python -m tests.campaigns publishers --store s3``: run one campaign, or all, print a line each; exit 1 if one failed."""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.places import Outcome, place

NAMES = ("publishers", "acknowledgements", "tags", "corruption", "gc", "resend", "memory", "throughput", "nights")


def run(name: str, kind: str, count: int | None, seed: int, folder: Path) -> Outcome:
    """One campaign in one kind of store; without a ``count`` as long as the issue of a figure takes."""
    module = importlib.import_module(f"tests.campaigns.{name}")
    with place(kind, folder) as there:
        return module.run(there, module.COUNT if count is None else count, seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="none for all of them")
    parser.add_argument("--store", choices=("folder", "s3"), help="default: each that the campaign is for")
    parser.add_argument("--count", type=int, help="default: that of the figure in docs/stores.md")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the store logs its findings, thousands of times
    failed = 0
    for name in options.names or NAMES:
        stores = importlib.import_module(f"tests.campaigns.{name}").STORES
        for kind in [options.store] if options.store else stores:
            folder = Path(tempfile.mkdtemp(prefix="campaign-"))
            began = time.monotonic()
            try:
                done = run(name, kind, options.count, options.seed, folder / "place")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{done.line} in {time.monotonic() - began:.0f} s{'' if done.is_met else ': MISSED'}", flush=True)
            failed += not done.is_met
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
