"""What a run costs before its first stage begins: processor seconds of imports, and of a cached run as a whole."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"
IMPORTS = {
    "prefect": "import prefect.tasks",
    "align run": """
import flows.cli, alignment_core.recipes
from alignment_core.imports import hidden, uncollected
with uncollected(), hidden("pandas"):
    import flows.any_recipe""",
    "a deployed flow": "from flows.alignment import deployed_quickstart",
    "prefect's server": "import flows.prefect_server",
}
TIMES = 3


def cost(command: list[str], home: str) -> dict[str, float]:
    """Wall and processor seconds of the cheapest of three: what else runs on the machine only adds to them."""
    found = []
    for _ in range(TIMES):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env={**os.environ, "ALIGN_HOME": home}, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((used, time.monotonic() - began))
    used, wall = min(found)
    return {"processor_seconds": round(used, 2), "seconds": round(wall, 2)}


def main() -> None:
    """With ``BENCH_HOME`` (an ALIGN_HOME in which the quickstart has run) its cached run is measured, too."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        for name, code in IMPORTS.items():
            print(json.dumps({"imports": name, **cost([sys.executable, "-c", code], home)}), flush=True)
    if warm := os.environ.get("BENCH_HOME"):
        run = [sys.executable, "-m", "flows.cli", "run", str(RECIPE)]
        print(json.dumps({"run": "quickstart, all cached", **cost(run, warm)}), flush=True)


if __name__ == "__main__":
    main()
