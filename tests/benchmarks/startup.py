"""The cost of a run beside training: processor seconds of imports, of refused recipes, and of short runs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
ALIGN = [sys.executable, "-m", "alignment.flows.cli.main", "run"]
IMPORTS = {
    "prefect": "import prefect.tasks",
    "align run": """
import alignment.flows.cli.main, alignment_core.recipes
from alignment_core.imports import hidden, uncollected
with uncollected(), hidden("pandas"):
    import alignment.flows.recipe_flow""",
    "a deployed flow": "from alignment.flows.deployment_flows import deployed_quickstart",
    "prefect's server": "import alignment.flows.service.prefect_server",
}
TIMES = 3
REFUSED = 2
SFT = """
method: sft
name: ten-steps
model:
  scratch: {architecture: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 3, num_attention_heads: 4}
sft:
  data: {task: reverse, rows: 2000}
  training: {batch_size: 64, learning_rate: 2.0e-3, max_steps: 10}
resources: {zero_stage: 0}
"""


def cost(command: list[str], home: str, code: int = 0, seeds: bool = False) -> dict[str, float]:
    """Wall and processor seconds of the cheapest of three: other load only adds to them.

    The command ends with ``code``; with ``seeds`` each of the three runs has another seed, and nothing cached.
    """
    seconds = []
    for number in range(TIMES):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        given = [*command, "--set", f"seed={number}"] if seeds else command
        environment = {**os.environ, "ALIGN_HOME": home}
        done = subprocess.run(given, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert done.returncode == code, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append((used, time.monotonic() - began))
    used, wall = min(seconds)
    return {"processor_seconds": round(used, 2), "seconds": round(wall, 2)}


def runs(home: str) -> Iterator[tuple[str, dict[str, float]]]:
    """A malformed row, a reward function that always fails, and 10 steps of SFT, in a home that soon is warm."""
    folder = Path(home)
    rows = [json.dumps({"prompt": f"{number}?", "completion": "yes"}) for number in range(200)]
    (folder / "bad.jsonl").write_text("\n".join([*rows, "{broken", ""]))
    (folder / "fails.py").write_text("def fails(rows):\n    return 1 / 0\n")
    (folder / "sft.yaml").write_text(SFT)
    sft, grpo = [*ALIGN, str(folder / "sft.yaml")], [*ALIGN, str(RECIPES / "grpo.yaml")]
    yield "malformed row", cost([*sft, "--set", f"sft.data={{path: {folder / 'bad.jsonl'}}}"], home, REFUSED)
    reward = f"rl.rewards=[{{function: '{folder / 'fails.py'}:fails'}}]"
    yield "grpo.yaml, a reward that fails", cost([*grpo, "--set", reward], home, REFUSED)
    yield "10 steps of SFT", cost(sft, home, seeds=True)


def main() -> None:
    """With ``BENCH_HOME`` (an ALIGN_HOME in which the quickstart has run) its cached run is measured, too."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        for name, code in IMPORTS.items():
            print(json.dumps({"imports": name, **cost([sys.executable, "-c", code], home)}), flush=True)
        for name, seconds in runs(home):
            print(json.dumps({"run": name, **seconds}), flush=True)
    if warm := os.environ.get("BENCH_HOME"):
        run = [*ALIGN, str(RECIPES / "quickstart.yaml")]
        print(json.dumps({"run": "quickstart, all cached", **cost(run, warm)}), flush=True)


if __name__ == "__main__":
    main()
