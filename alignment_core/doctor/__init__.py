"""``align doctor``: every check is a plain function that returns ok, warning or failed, and the fix."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from alignment_core.artifacts import open_store
from alignment_core.doctor import environment, machine
from alignment_core.doctor.environment import discreet
from alignment_core.doctor.machine import SECONDS, Answer, Check, State
from alignment_core.errors import AlignmentError
from alignment_core.home import align_home


class Finding(BaseModel):
    """Result of one check."""

    name: str
    state: State
    sentence: str


def examine(store: str | None = None) -> list[Finding]:
    """Run all checks concurrently. A check that raises, or has no result in time, has failed; no error escapes."""
    chosen = checks(store)
    findings: dict[str, Finding] = {}

    def run(name: str, check: Check) -> None:
        state, sentence = _guarded(check)
        findings[name] = Finding(name=name, state=state, sentence=sentence)

    # Daemons: a check that hangs, say on a dead network file system, must not keep the command from ending.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in chosen.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"did not answer within {SECONDS:g} seconds; is a network file system or server down?"
    return [findings.get(name, Finding(name=name, state="failed", sentence=late)) for name in chosen]


def as_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output of ``align doctor --json``."""
    failed = any(finding.state == "failed" for finding in findings)
    return {"status": "failed" if failed else "ok", "checks": [finding.model_dump() for finding in findings]}


def checks(store: str | None) -> dict[str, Check]:
    """Every check by its name, in the order of the output."""
    return {
        "python": machine.python,
        "packages": machine.packages,
        "processors": machine.processors,
        "accelerators": machine.accelerators,
        "memory": machine.memory,
        "ALIGN_HOME": lambda: machine.own_disk(align_home()),
        "disk of ALIGN_HOME": lambda: machine.disk(align_home()),
        "disk of the store": lambda: machine.disk(open_store(store).workspace.root),
        "store": lambda: environment.store_probe(store),
        "shared memory": machine.shared_memory,
        "open files": machine.open_files,
        "socket paths": machine.socket_paths,
        "loopback": environment.loopback,
        "prefect": environment.prefect,
        "Hub credentials": lambda: discreet(environment.hub_credentials),
        "W&B credentials": lambda: discreet(environment.wandb_credentials),
        "AWS credentials": lambda: discreet(environment.aws_credentials),
        "proxies": lambda: discreet(environment.proxies),
    }


def _guarded(check: Check) -> Answer:
    try:
        return check()
    except AlignmentError as error:
        return "failed", str(error)
    except Exception as error:
        return "failed", f"the check itself failed: {type(error).__name__}: {error}"
