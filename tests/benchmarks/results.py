"""Results of figures as they were measured: kept in docs/performance.json, from which the tables are rendered."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from alignment_core.cluster.device import cpu_model, cpu_multiplies_bf16

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "performance.json"

Line = Mapping[str, Any]
"""A JSON object that a benchmark prints."""


@dataclass(frozen=True)
class Stamp:
    """When, where and with which code a command ran."""

    date: str
    machine: str
    commit: str

    def __str__(self) -> str:
        day = date.fromisoformat(self.date)
        return f"{day.day} {day:%B %Y}, {self.machine}, commit {self.commit}"


@dataclass(frozen=True)
class Run:
    """One run of a command, and its output. ``seconds``: None for figures that are older than this file."""

    command: str
    stamp: Stamp
    seconds: float | None
    lines: Sequence[Line]


Results = dict[str, list[Run]]
"""By the name of the figure; the runs of a command follow each other in order of time."""


@dataclass(frozen=True)
class Figure:
    """A table of the page, and the commands that measure it."""

    name: str
    measures: str
    commands: tuple[str, ...]
    minutes: float
    """An estimate on two cores; once it is measured, the duration of the kept runs is shown instead."""
    table: Callable[[Sequence[Run]], str]
    """The table in Markdown. Raises KeyError if the commands printed something else."""
    runs: int = 1
    """Of each command; the table shows the range."""
    exit_codes: tuple[int, ...] = (0,)
    """Codes with which a command has measured everything."""


class MeasurementError(Exception):
    """A command failed, or printed nothing that the table can show."""


def load(path: Path | None = None) -> Results:
    """The results in a file, by default the kept ones. Raises OSError, or ValueError if it is no file of results."""
    if path is None and not RESULTS.exists():
        return {}
    content = (path or RESULTS).read_text()
    try:
        return {
            name: [Run(**{**run, "stamp": Stamp(**run["stamp"])}) for run in runs]
            for name, runs in json.loads(content).items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it does not have the form of {RESULTS.name}") from error


def save(results: Results) -> None:
    """Keep all results. The file is complete at any time, also if the process is killed."""
    content = {name: [asdict(run) for run in runs] for name, runs in sorted(results.items())}
    new = RESULTS.with_name(f".{RESULTS.name}.new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    new.replace(RESULTS)


def measure(command: str, exit_codes: Sequence[int] = (0,)) -> Run:
    """Run a command in a new ALIGN_HOME and keep the JSON objects that it prints. Raises MeasurementError."""
    stamp = Stamp(datetime.now(UTC).date().isoformat(), machine(), commit())
    program, *arguments = shlex.split(command)
    assert program == "python"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="figures-") as home:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "ALIGN_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode not in exit_codes:
        raise MeasurementError(f"{command}: exit code {done.returncode}; its reason is above")
    try:
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    except ValueError as error:
        raise MeasurementError(f"{command}: it printed a line that is no JSON: {error}") from None
    if not lines:
        raise MeasurementError(f"{command}: it printed no JSON object")
    return Run(command, stamp, round(time.monotonic() - began, 1), lines)


def machine() -> str:
    """The processor, its extensions that decide about the speed of matrix products, and the number of usable cores."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    extensions = {"AVX-512": "avx512f" in flags, "bf16": cpu_multiplies_bf16()}
    names = " and ".join(name for name, present in extensions.items() if present)
    model = cpu_model() or "unknown processor"
    return f"{model} {f'with {names}' if names else 'without AVX-512 and bf16'}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit of the checkout, with a + if code of it was changed since."""
    head = _git("rev-parse", "--short=8", "HEAD").stdout.strip()
    return head if is_same_code(head) else f"{head}+"


def is_same_code(commit: str) -> bool:
    """Whether the checkout has the code of a commit; documents may differ. False for an unknown commit."""
    code = (".", ":!docs", ":!*.md")
    unknown = _git("ls-files", "--others", "--exclude-standard", "--", *code).stdout.strip()
    return not unknown and _git("diff", "--quiet", commit, "--", *code).returncode == 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
