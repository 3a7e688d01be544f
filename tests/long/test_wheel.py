"""Services and a plug-in over the installed wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.deployments.installed import FEW_STEPS, Environment, build, installed, wheel
from tests.pages import DOCS, files_of
from tests.processes import free_port, processes_of, wait_until

__all__ = ["installed", "wheel"]
PLUG_IN = files_of(DOCS / "extending.md")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
