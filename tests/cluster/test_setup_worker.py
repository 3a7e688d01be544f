"""Our ``setup_worker.py`` against Ray's own: the same worker, with the same environment, from the same command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment_core.cluster.ray_cluster import SETUP_WORKER

SHOW = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], {n: v for n, v in os.environ.items() if n[:4] == 'OURS'}]))"
)
WORKER = ["default_worker.py", "--node-ip-address=127.0.0.1", "--name=of two words", "--quoted='$HOME'"]
VARIABLES = {"OURS": "hello world", "OURS_EXPANDED": "${OURS_BEFORE}, ${OURS_NEVER} and $OURS_BEFORE", "OURS_EMPTY": ""}
PREFIXED: dict[str, Any] = {"command_prefix": ["export OURS_FIRST=1", "&&"], "env_vars": VARIABLES}


@pytest.fixture(scope="module")
def of_ray() -> Path:
    import ray

    return Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"


def started(script: Path, context: dict[str, Any] | None) -> Any:
    options = ["--language=PYTHON"]
    if context is not None:
        shows = f"{sys.executable} -c {shlex.quote(SHOW)}"
        options.append(f"--serialized-runtime-env-context={json.dumps({'py_executable': shows, **context})}")
    environment = {**os.environ, "OURS_BEFORE": "$5"}
    command = [sys.executable, str(script), WORKER[0], *options, *WORKER[1:]]
    return json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    )


@pytest.mark.parametrize("context", [{}, {"env_vars": VARIABLES}, PREFIXED], ids=["nothing", "variables", "a prefix"])
def test_a_worker_starts_as_rays_own_script_starts_it(context: dict[str, Any], of_ray: Path) -> None:
    """The prefix stands for runtime environments that are not ours: those go to Ray's own script."""
    words, variables = started(SETUP_WORKER, context)
    assert (words, variables) == tuple(started(of_ray, context))
    assert words == WORKER
    if context:
        assert variables["OURS_EXPANDED"] == "$5,  and $5"


def test_it_does_not_import_ray() -> None:
    """That is what it is for."""
    run = "import runpy, sys; sys.modules['ray'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    context = json.dumps({"py_executable": "echo"})
    command = [sys.executable, "-c", run, str(SETUP_WORKER), f"--serialized-runtime-env-context={context}"]
    done = subprocess.run(
        [*command, "--language=PYTHON", "worker"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "worker\n"
