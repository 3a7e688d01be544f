"""``python -m tests.real``: a pretrained model learns by every method of real-model.yaml; its table and samples.

    python -m tests.real [--seeds N] [--model FOLDER] [--set FIELD=VALUE …]

Runs resume and are cached, in ``ALIGN_HOME``: the same command again goes on where it ended. Figures and samples are saved as
docs/real-model.md, unless ``--set`` changes the recipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from alignment.flows.cli.run import NOT_PROMOTED, PARTLY_FAILED
from tests.benchmarks.laps import Taken, sample_memory
from tests.real_model import RealModelError, real_model

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("real-model.yaml")
PAGE = ROOT / "docs" / "real-model.md"
SHOWN = ("grpo", "ppo")
"""Policies whose answers the page shows, beside those of the start."""
SAMPLES = 10
START = "start"


@dataclass(frozen=True)
class Run:
    """A run of the recipe with one seed."""

    seed: int
    outcome: dict[str, Any]
    samples: list[dict[str, Any]]
    memory: int
    """Bytes of all its processes at their peak; of a run whose stages are cached, too small."""

    @property
    def policies(self) -> dict[str, dict[str, float]]:
        """The metrics of the start and of each branch."""
        policies: dict[str, dict[str, float]] = self.outcome["metrics"]["policies"]
        return policies

    def seconds(self, branch: str) -> float:
        """Of the branch's stages, when they were computed, without start-up and waits."""
        stages = {stage["key"]: stage for stage in self.outcome["stages"] if stage["label"].startswith(f"{branch}/")}
        return sum(float(stage["cost"].get("seconds", 0)) for stage in stages.values())


def align(*arguments: str) -> tuple[dict[str, Any], int]:
    """The object that ``align … --json`` prints last, and the peak memory of its processes. Raises CalledProcessError."""
    command = [sys.executable, "-m", "alignment.flows.cli.main", *arguments, "--json"]
    taken, ended = Taken(), threading.Event()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        sampler = threading.Thread(target=sample_memory, args=(psutil.Process(process.pid), taken, ended))
        sampler.start()
        try:
            printed, _ = process.communicate()
        finally:
            ended.set()
            sampler.join()
    if process.returncode not in (0, NOT_PROMOTED, PARTLY_FAILED):  # whether it learnt enough is for the table
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(printed.strip().splitlines()[-1]), taken.memory


def run(seed: int, model: Path, overrides: Sequence[str]) -> Run:
    settings = [f"seed={seed}", f"model={model}", *overrides]
    outcome, memory = align("run", str(RECIPE), *(part for each in settings for part in ("--set", each)))
    samples, _ = align("samples", outcome["run_id"], "-n", str(SAMPLES))
    return Run(seed, outcome, samples["rows"], memory)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """One row for each seed and method, in Markdown."""
    yield "| seed | method | answers that follow all instructions: before | after | KL, nats | tokens | minutes |"
    yield "|---|---|---|---|---|---|---|"
    for each in runs:
        before = each.policies[START]
        for name, after in each.policies.items():
            if name != START:
                cells = [str(each.seed), name, _interval(before), _interval(after), _number(after.get("kl"), 1)]
                cells += [_number(after.get("length"), 1), _number(each.seconds(name) / 60, 1)]
                yield f"| {' | '.join(cells)} |"
        for name, problem in each.outcome["failed"].items():
            yield f"| {each.seed} | {name} | failed | {problem.splitlines()[0]} | | | |"


def _interval(policy: dict[str, float]) -> str:
    return f"{policy['accuracy']:.3f} [{policy['accuracy.low']:.3f}, {policy['accuracy.high']:.3f}]"


def _number(value: float | None, decimals: int) -> str:
    return "—" if value is None else f"{value:.{decimals}f}"


def page(runs: Sequence[Run]) -> str:
    """The page with the table and samples of the first seed."""
    peak = max(each.memory for each in runs) / 1e9
    lines = [
        "# A pretrained model",
        "",
        "Written by `python -m tests.real`: SmolLM2-135M-Instruct learns to follow instructions that a program verifies",
        "([real-model.yaml](../tests/real/real-model.yaml)). Intervals are of 95 % over held-out prompts.",
        "",
        *table(runs),
        "",
        f"All processes of a run had {peak:.1f} GB of memory at their peak.",
    ]
    for name in (name for name in SHOWN if name in runs[0].policies):
        lines += ["", f"## Answers before and after: {name}", "", "Held-out prompts, evenly spaced and uncut."]
        for row in runs[0].samples:
            lines += ["", f"**{row['prompt']}**", "", "```text", row[START], "```", "", "```text", row[name], "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = ArgumentParser(prog="python -m tests.real")
    parser.add_argument("--seeds", type=int, default=int(os.environ.get("SEEDS") or 1), help="by default SEEDS, or 1")
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct is made")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the recipe")
    given = parser.parse_args(arguments)
    try:
        model = given.model or real_model()
    except RealModelError as error:
        sys.exit(str(error))
    try:
        runs = [run(seed, model, given.set) for seed in range(1, given.seeds + 1)]
    except subprocess.CalledProcessError as error:  # which printed the reason
        sys.exit(f"the run ended with exit code {error.returncode}; the same command resumes it")
    print("\n".join(table(runs)))
    if not given.set:
        PAGE.write_text(page(runs))


if __name__ == "__main__":
    main()
