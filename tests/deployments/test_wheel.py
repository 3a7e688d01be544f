"""The wheel, installed outside any checkout: a single public name, and the first commands of a new user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pydantic
import pytest

from alignment.flows.shipped_recipes import FOLDER
from tests.deployments.up import ROOT
from tests.pages import DOCS, files_of
from tests.processes import free_port, processes_of, wait_until

PLUG_IN = files_of(DOCS / "extending.md")
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
OURS = ("alignment", "alignment_core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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


def test_the_wheel_has_the_public_packages_and_recipes_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(OURS)
    recipes = {name.removeprefix("alignment/recipes/") for name in names if name.startswith("alignment/recipes/")}
    assert recipes == {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")}
    assert {"alignment/prefect.yaml", "alignment/py.typed", "alignment_core/py.typed"} <= set(names)
    packed = {name for name in names if name.startswith("alignment/") and name.endswith(".py")}
    ours = {f"alignment/{path.relative_to(ROOT)}" for top in ("flows", "tasks") for path in (ROOT / top).rglob("*.py")}
    assert packed == ours | {"alignment/__init__.py"}


def test_the_installed_package_is_imported_and_shadows_no_other_names(installed: Environment) -> None:
    (installed.folder / "work" / "flows").mkdir(parents=True, exist_ok=True)
    (installed.folder / "work" / "flows" / "__init__.py").write_text("MINE = True\n")
    code = (
        "import alignment, alignment_core, importlib.util, sys; sys.path.insert(0, '.'); import flows; assert flows.MINE\n"
        "print(alignment.__file__, alignment_core.__file__, importlib.util.find_spec('tasks'), alignment.sft.__name__)"
    )
    where = installed.run("-c", code).split()
    assert str(ROOT) not in " ".join(where)
    assert where[0].startswith(str(installed.folder))
    assert where[2:] == ["None", "sft"]


def test_an_installed_recipe_runs_by_name(installed: Environment) -> None:
    outcome = installed.align("run", "quickstart", *(word for override in FEW_STEPS for word in ("--set", override)))
    assert outcome["status"] == "completed"
    assert installed.align("check", "sweep")["status"] == "checked"
    printed = installed.run("align", "fields", "sft")
    assert "sft" in printed


def test_installed_services_run_installed_deployments(installed: Environment) -> None:
    try:
        installed.run("align", "up", "--port", str(free_port()))
        assert installed.align("status")["services"]["problems"] == {}
        overrides = json.dumps([*FEW_STEPS, "iterative_dpo.loss.beta=0.2"])  # one stage and its dependants
        run = f"prefect deployment run alignment/quickstart --param 'overrides={overrides}' --watch"
        script = f'eval "$({installed.bin}/align env)" && {installed.python} -m {run}'
        installed.run("-c", "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', sys.argv[1]]))", script)
        (ran,) = (run for run in installed.align("status")["runs"] if run["deployed"])
        assert ran["status"] == "completed"
    finally:
        installed.run("align", "down")
    assert wait_until(lambda: not processes_of(installed.home), 60)


def test_a_plug_in_works_with_the_installed_package(installed: Environment, tmp_path: Path) -> None:
    for name, text in PLUG_IN.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    installed.install(build(tmp_path, tmp_path / "source"))
    few = ("--set", "unlikelihood.training.max_steps=3", "--set", "resources={trainers: 1, engines: 1, threads: 1}")
    outcome = installed.align("run", "unlikelihood-tiny", *few)
    assert {"unlikelihood", "report"} <= {stage["label"] for stage in outcome["stages"]}
