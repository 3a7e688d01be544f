"""`align up` as the tests use it: services in a home of their own, over their command and the server's API."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PASSWORD = "secret-of-the-test"
"""Of the PostgreSQL user; it must be found in no file."""
SIGNS = {"server": "server start", "worker": "worker start", "reconciler": "flows.reconcile"}


class Services:
    """What `align up` started, in a home of its own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.home = home
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = {**os.environ, "ALIGN_HOME": str(home), "PREFECT_API_URL": self.url}

    def align(self, *arguments: str, expect: int = 0) -> dict[str, Any]:
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        environment = {name: value for name, value in self.environment.items() if name != "PREFECT_API_URL"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == expect, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def prefect(self, *arguments: str) -> str:
        """What a command of Prefect's own prints."""
        command = [str(BIN / "prefect"), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def get(self, path: str, body: Any = None) -> Any:
        """The answer of the server's API; a body makes it a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def start_run(self, overrides: list[str]) -> str:
        """The id of a new run of the deployment `sft`."""
        parameter = f"overrides={json.dumps(overrides)}"
        printed = self.prefect("deployment", "run", "alignment/sft", "--param", parameter)
        return next(word for word in printed.split() if word.count("-") == 4)

    def states(self, run_id: str) -> list[tuple[str, datetime]]:
        listed = self.get(f"/flow_run_states/?flow_run_id={run_id}")
        return [(one["name"], datetime.fromisoformat(one["timestamp"])) for one in listed]

    def state(self, run_id: str) -> str:
        return self.states(run_id)[-1][0]

    def pid(self, service: str) -> int:
        """The service's own process, below its supervisor."""
        state = self.align("status")["services"]
        supervisor = next(one["pid"] for one in state["services"] if one["name"] == service)
        children = [one for one in psutil.Process(supervisor).children() if one.status() != psutil.STATUS_ZOMBIE]
        return next(child.pid for child in children if SIGNS[service] in " ".join(child.cmdline()))
