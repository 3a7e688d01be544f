"""What Ray runs as its ``setup_worker.py``: give a process the environment of its actor, then make it the worker.

Ray's own imports Ray for that, for 0.4 to 1 s of processor time, and the worker imports it once more. This one leaves to it
what only other runtime environments have, such as containers.
"""

import json
import os
import re
import runpy
import shlex
import sys

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
KNOWN = {"env_vars", "py_executable"}
"""What our runtime environments set; everything else is Ray's to understand."""


def main() -> None:
    options = (CONTEXT, LANGUAGE)
    own = {option: word.removeprefix(option) for word in sys.argv[1:] for option in options if word.startswith(option)}
    worker = [word for word in sys.argv[1:] if not word.startswith(options)]
    context = {name: value for name, value in json.loads(own.get(CONTEXT) or "{}").items() if value}
    if set(context) - KNOWN or own.get(LANGUAGE) != "PYTHON":
        runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
        return
    for name, value in context.get("env_vars", {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))  # as Ray does
    command = f"exec {context.get('py_executable') or sys.executable} {shlex.join(worker)}"
    os.execvp("bash", ["bash", "-c", command])


if __name__ == "__main__":
    main()
