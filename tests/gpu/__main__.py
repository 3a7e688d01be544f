"""``make gpu``: what works on this machine's GPU, part by part, in at most ten minutes.

    python -m tests.gpu [--only PART …] [--json]

It needs no package beside torch and `transformers`: a part that does says what it lacks. Each part is a process of its own, so
that one which hangs or crashes takes no other with it. Exits 1 if a part failed, or if none passed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

from tests.gpu.report import FAILED, NOT_RUN, PASSED, CannotRun, Result, State, as_json, failed, text

PARTS = {
    "machine": "machine:run",
    "attention": "attention:run",
    "flash": "attention:run_flash",
    "head": "head:run",
    "learner": "learner:run",
    "transfer": "transfer:run",
    "channel": "channel:run",
    "engine": "engine:run",
    "grpo": "grpo:run",
    "speed": "speed:run",
}
"""The parts in their order, and the function of each: kind of device → figures."""
MOST_SECONDS = 600.0
"""For all parts."""
ROOT = Path(__file__).parents[2]
LAST_LINES = 5
"""Of the output of a part that ended without a result."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print the report; the exit code."""
    parser = ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help=SUPPRESS)  # `cpu`: a test of this check
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help=SUPPRESS)
    parser.add_argument("--result", type=Path, help=SUPPRESS)
    options = parser.parse_args(arguments)
    if options.result:
        options.result.write_text(json.dumps(_work(options.only[0], options.on)))
        return 0
    deadline = time.monotonic() + options.seconds
    results = []
    for index, part in enumerate(options.only):
        results.append(_result(part, options.on, limit_of(deadline - time.monotonic(), len(options.only) - index)))
        if not options.json:
            print(text(results[-1:]).rpartition("\n")[0], flush=True)
    print(json.dumps(as_json(results)) if options.json else text(results).rpartition("\n")[2])
    return int(failed(results))


def limit_of(left: float, parts: int) -> float:
    """The most seconds of the next part, if so many are ``left`` for this number of parts: up to twice an equal share, so that
    one that hangs leaves time to the others."""
    return 2 * left / (parts + 1)


def _result(part: str, kind: str, limit: float) -> Result:
    """Run a part in a process of its own, for at most so many seconds."""
    if limit <= 0:
        return Result(part, NOT_RUN, reason="the parts before it took all of the time")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "result"), Path(folder, "log")
        command = [sys.executable, "-m", "tests.gpu", "--only", part, "--on", kind, "--result", str(file)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_session(process)
        seconds = time.monotonic() - started
        if file.is_file():
            return Result(part=part, seconds=seconds, **json.loads(file.read_text()))
        lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        why = f"not done after {limit:.0f} seconds" if code is None else f"its process ended with code {code}"
        return Result(part, FAILED, seconds, " | ".join([why, *lines]))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and those that it started, if some are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _work(part: str, kind: str) -> dict[str, Any]:
    """The result of a part in this process, without its seconds."""
    module, _, function = PARTS[part].partition(":")
    state: State
    try:
        figures = getattr(importlib.import_module(f"tests.gpu.{module}"), function)(kind)
        state, reason = PASSED, ""
    except CannotRun as error:
        state, reason, figures = NOT_RUN, str(error), {}
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("tests", "alignment_core"):
            raise
        state, reason, figures = NOT_RUN, f"the package {error.name} is not installed", {}
    except AssertionError as error:
        state, reason, figures = FAILED, str(error) or repr(error), {}
    except Exception as error:
        import traceback

        traceback.print_exc()
        state, reason, figures = FAILED, f"{type(error).__name__}: {error}", {}
    return {"state": state, "reason": reason, "figures": figures}


if __name__ == "__main__":
    sys.exit(main())
