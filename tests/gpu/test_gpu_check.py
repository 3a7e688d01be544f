"""The parts of ``make gpu`` run here on a CPU; what only a GPU has is not tested by that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as check
from tests.gpu.report import Result, as_json, failed, text
from tests.gpu.size import Size
from tests.gpu.speed import flops_per_token
from tests.matrix import matrix

ROOT = Path(__file__).parents[2]


def checked(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code and the report of ``python -m tests.gpu``, and its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", matrix([part for part in check.PARTS if part != "flash"], usual=["head", "learner"]))
def test_each_part_passes_on_a_cpu(part: str) -> None:
    code, report, errors = checked("--on", "cpu", "--only", part)
    (result,) = report["parts"]
    assert (code, result["part"], result["state"]) == (0, part, "passed"), (result, errors)
    assert result["figures"]
    assert all("\n" not in str(value) for value in result["figures"].values())


@pytest.mark.slow
def test_without_a_gpu_no_part_runs_and_the_report_says_why() -> None:
    code, report, _ = checked("--only", "head", "flash")
    head, flash = report["parts"]
    assert code == 1, "nothing passed"
    assert head["state"] == flash["state"] == "could not run"
    assert "sees no GPU" in head["reason"]


def test_a_part_that_crashes_hangs_or_comes_too_late_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(
        "#!/bin/sh\necho starts\n[ $4 = head ] && exec sleep 60\necho breaks >&2\nkill -ABRT $$\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    crashed = check._result("learner", "cpu", 30)
    assert (crashed.state, crashed.reason) == ("failed", "its process ended with code -6 | starts | breaks")
    hung = check._result("head", "cpu", 0.5)
    assert (hung.state, hung.reason.split(" | ")[0]) == ("failed", "not done after 0 seconds")
    late = check._result("speed", "cpu", -1)
    assert (late.state, late.reason) == ("could not run", "the parts before it took all of the time")


def test_a_part_that_hangs_leaves_time_to_the_others() -> None:
    """Two parts that hang, of the three that are left."""
    assert check.limit_of(600.0, 3) == 300.0
    assert check.limit_of(300.0, 2) == 200.0
    assert check.limit_of(100.0, 1) == 100.0


def test_a_part_without_its_package_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.PARTS, "head", "no_such_part:run")
    with pytest.raises(ModuleNotFoundError):
        check._work("head", "cpu")  # a mistake of ours is no missing package

    def lacks(_kind: str) -> None:
        raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

    monkeypatch.setattr("tests.gpu.machine.run", lacks)
    assert check._work("machine", "cpu")["reason"] == "the package deepspeed is not installed"


@pytest.mark.parametrize(
    ("states", "fails"),
    [
        (("passed",), False),
        (("passed", "could not run"), False),
        (("passed", "failed"), True),
        (("could not run",), True),
        ((), True),
    ],
)
def test_the_check_fails_if_a_part_fails_or_none_passes(states: tuple[Any, ...], fails: bool) -> None:
    results = [Result(f"part-{number}", state) for number, state in enumerate(states)]
    assert failed(results) is as_json(results)["failed"] is fails
    assert all(f"part-{number}" in text(results) for number in range(len(states)))


def test_products_are_counted_as_in_palm() -> None:
    """6 N = 6e9, and of attention 12 · 2 layers · 8 heads · 64 · 100 tokens, half of them: causal."""
    size = Size(hidden=512, layers=2, heads=8, groups=8, vocabulary=1, prompt=1, answer=1)
    assert flops_per_token(10**9, size, 100) == 6e9 + 12 * 2 * 8 * 64 * 100 / 2
