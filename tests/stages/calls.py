"""What tests of stages share: a call to change, machines that have no actors, and a fresh interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageCall

ROOT = Path(__file__).parents[2]


class HostAlone:
    """Machines of a host whose stages need no actors."""

    def hardware(self, *_: Any) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def processor(self, *_: Any) -> Any:
        yield lambda: None


def reference(kind: str, digit: str) -> Reference:
    return Reference(kind, digit * 64)


def call(**changed: Any) -> StageCall:
    fields = {
        "stage": "sft",
        "label": "sft",
        "config": {"training": {"learning_rate": 1e-4, "batch_size": 8}},
        "inputs": {"model": reference("model", "1"), "data": reference("dataset", "2")},
        "seed": 3,
    }
    return StageCall.model_validate(fields | changed)


def python(code: str, **environment: str) -> Any:
    """What ``code``, run by a fresh interpreter, prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
