"""A sweep of three values of β over the quickstart, and the same as three runs that share nothing: seconds of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

FIELD, VALUES = "iterative_dpo.loss.beta", ("0.05", "0.1", "0.3")


def run(home: str, *options: str) -> float:
    """Seconds of ``align run quickstart`` in a new home."""
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", "quickstart", "--json", *options]
    began = time.monotonic()
    subprocess.run(command, env={**os.environ, "ALIGN_HOME": home}, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    """The runs of one value first, then the sweep; all begin with nothing."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        alone = [run(f"{place}/{value}", "--set", f"{FIELD}={value}") for value in VALUES]
        together = run(f"{place}/sweep", "--sweep", f"{FIELD}={','.join(VALUES)}")
    figures = {"alone, seconds": [round(duration, 1) for duration in alone], "sweep, seconds": round(together, 1)}
    print(json.dumps({**figures, "ratio": round(together / sum(alone), 3), "goal": 0.6}))


if __name__ == "__main__":
    main()
