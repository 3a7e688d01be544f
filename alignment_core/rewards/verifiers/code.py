"""`verifier: code`: whether the Python code of a completion passes the tests of its label, in a sandbox."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from alignment_core.cores import usable_cores
from alignment_core.errors import EnvironmentFault
from alignment_core.rewards.named import NamedVerifier, Rows
from alignment_core.rewards.results import Answers
from alignment_core.rewards.sandbox.runner import SECONDS, check_limits, passes_tests, run_program
from alignment_core.user_code.errors import Failed

FENCE = re.compile(r"^```(?:python|py)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
LEAST_SECONDS = 2.0
"""Least time for one of several inputs: a program that has not started by then would be reported as a fault of the machine."""
FORM = '`{"tests": "assert …"}` or `{"inputs": ["…", …], "outputs": ["…", …]}`'


class CodeTests:
    """Runs the programs of completions, one per core at a time, until it is closed.

    Raises EnvironmentFault if this machine cannot enforce the limits.
    """

    def __init__(self, field: str) -> None:
        self._stop = threading.Event()
        try:
            check_limits(self._stop)
        except EnvironmentFault as error:
            raise EnvironmentFault(f"{field}: `code` {error}") from None

    def __call__(self, rows: Rows) -> Answers:
        """For each row 1.0 if the program passes all tests, else 0.0; Failed if the label has no tests."""
        with ThreadPoolExecutor(usable_cores()) as pool:
            running = {
                pool.submit(self._score, row["completion_text"], row["label"]): number
                for number, row in enumerate(rows)
            }
            try:
                for done in as_completed(running):
                    yield running[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End all running programs."""
        self._stop.set()

    def _score(self, completion: str, label: str | None) -> float | Failed:
        try:
            tests = _tests(label)
        except ValueError as error:
            return Failed("raised", f"failed: the label is not {FORM}: {error}")
        program = code_of(completion)
        if "tests" in tests:
            return float(passes_tests(program, tests["tests"], self._stop))
        until = time.monotonic() + SECONDS
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            if (left := until - time.monotonic()) <= 0:
                return 0.0
            ended = run_program(program, given, self._stop, seconds=max(left, LEAST_SECONDS))
            if ended.code != 0 or _lines(ended.output.decode(errors="replace")) != _lines(wanted):
                return 0.0
        return 1.0


def code_of(completion: str) -> str:
    """The last block fenced as Python, or all of it."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def _tests(label: str | None) -> dict[str, Any]:
    try:
        tests = json.loads(label or "")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(tests, dict):
        raise ValueError("it is not an object")
    if tests.keys() == {"tests"} and isinstance(tests["tests"], str) and tests["tests"].strip():
        return tests
    if tests.keys() != {"inputs", "outputs"}:
        raise ValueError("it has other fields")
    inputs, outputs = tests["inputs"], tests["outputs"]
    texts = all(isinstance(side, list) and all(isinstance(text, str) for text in side) for side in (inputs, outputs))
    if not texts or len(inputs) != len(outputs) or not inputs:
        raise ValueError("`inputs` and `outputs` must be lists of texts, equally long")
    return tests


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


VERIFIER = NamedVerifier(open=CodeTests, runs_python=True)
