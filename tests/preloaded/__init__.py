"""Ray's actors in tests are forked from a process that has imported their libraries: alone, an actor imports for ten seconds.

Ray starts :mod:`~tests.preloaded.launch` in place of Python for each actor. It asks a :mod:`~tests.preloaded.server` that was
started with the same environment to fork, and ends as the fork ends. The first actor of an environment has its server started.
Actors of a Python other than that of the tests import for themselves, and with ``ALIGN_TESTS_PRELOADED=0`` all do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's variable, with the settings of the jobs that a process starts; without it actors import for themselves."""


def preload(owner: int | None = None) -> None:
    """Have the Rays that this process and its children start fork their actors, of servers that end with the process
    ``owner``, by default this one."""
    if os.environ.get("ALIGN_TESTS_PRELOADED") == "0":
        return
    sockets = tempfile.mkdtemp(prefix="preloaded-", dir="/tmp")  # a short path
    subprocess.Popen([sys.executable, "-I", "-S", str(FOLDER / "spawn.py"), sockets, str(owner or os.getpid())])
    executable = f"{sys.executable} -I -S {FOLDER / 'launch.py'} {sockets}"
    os.environ[JOB_CONFIG] = json.dumps({"runtime_env": {"py_executable": executable}, "metadata": {}})
