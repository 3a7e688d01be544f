"""The wheel, and an environment that has it and no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tests.deployments.up import ROOT

FEW_STEPS = (
    "sft.data={sources: [{task: first, rows: 400}]}",
    "reward_model.data={sources: [{task: first, rows: 400}], test_rows: 50}",
    "iterative_dpo.prompts={sources: [{task: first, rows: 400}]}",
    "evaluation.prompts={sources: [{task: first, split: test, rows: 64}]}",
    "sft.training.max_steps=4",
    "reward_model.training.max_steps=4",
    "iterative_dpo.training.max_steps=2",
    "iterative_dpo.rounds=1",
    "iterative_dpo.prompts_per_round=300",
    "iterative_dpo.selection.truncated=keep",
    "promotion=null",
    "resources={trainers: 1, engines: 1, threads: 1}",
)


def build(folder: Path, source: Path) -> Path:
    """A wheel of ``source``."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):  # in its present state, without leftovers of earlier builds
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    return build(folder, folder / "source")


class Environment:
    """An environment with the wheel in it, which sees the packages that it needs and no checkout."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.home, python = folder, folder / "home", folder / "environment" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])], check=True)
        where = "from sysconfig import get_path; print(get_path('purelib'))"
        site = Path(subprocess.check_output([str(python), "-c", where], text=True).strip())
        packages = Path(str(pydantic.__file__)).parents[1]
        (site / "shared.pth").write_text(f"{packages}\n")  # the .pth files there, as the checkout's, are not read
        self.python, self.bin = str(python), python.parent
        self.settings = {**os.environ, "ALIGN_HOME": str(self.home)}
        self.settings.pop("PYTHONPATH", None)
        self.install(wheel)

    def install(self, wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True, capture_output=True)

    def run(self, *command: str) -> str:
        """The output of ``align …``, or of Python with these arguments, in the user's folder."""
        (self.folder / "work").mkdir(exist_ok=True)
        program = [str(self.bin / "align"), *command[1:]] if command[0] == "align" else [self.python, *command]
        process = subprocess.run(
            program,
            cwd=self.folder / "work",
            env=self.settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, f"{command}: {process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        return process.stdout

    def align(self, *arguments: str) -> dict[str, Any]:
        """The JSON object that a command of ours prints last."""
        outcome: dict[str, Any] = json.loads(self.run("align", *arguments, "--json").strip().splitlines()[-1])
        return outcome


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path, migrated: Path) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("user"), wheel)
    (environment.home / "prefect").mkdir(parents=True)
    shutil.copyfile(migrated, environment.home / "prefect" / "prefect.db")
    return environment
