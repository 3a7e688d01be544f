"""`align up` for the tests: services in a separate home, through their command and the server's API."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from tests.processes import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ELSEWHERE = Path("/")
ALIGN = [sys.executable, "-m", "alignment.flows.cli.main"]
PASSWORD = "secret-of-the-test"
"""Of the PostgreSQL user; it must be found in no file."""
SIGNS = {
    "server": "alignment.flows.service.prefect_server",
    "worker": "alignment.flows.service.prefect_worker",
    "reconciler": "alignment.flows.service.reconcile",
    "pages": "alignment.flows.ui.server",
}


class Services:
    """The services of `align up`, in a separate home."""

    def __init__(self, home: Path, model: Path | None = None) -> None:
        """``model`` is the default model of its runs."""
        self.port = free_port()
        self.home, self.model = home, model
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.settings = {**os.environ, "ALIGN_HOME": str(home)}

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a shell after `eval "$(align env)"`."""
        printed = subprocess.run(
            [*ALIGN, "env"], cwd="/", env=self.settings, capture_output=True, text=True, check=True
        )
        shell = ["sh", "-c", f"{printed.stdout}\nenv -0"]
        exported = subprocess.run(shell, env=self.settings, capture_output=True, text=True, check=True).stdout
        return dict(line.split("=", 1) for line in exported.split("\0") if line)

    def align(
        self,
        *arguments: str,
        expect: int = 0,
        folder: Path = ELSEWHERE,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """The output of a command with `--json`, run in a folder outside the project."""
        done = subprocess.run(
            [*ALIGN, *arguments, "--json"],
            cwd=folder,
            env={**self.settings, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == expect, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def watch(self, run_id: str) -> subprocess.Popen[str]:
        """`align watch`, under way."""
        command = [*ALIGN, "watch", run_id, "--json"]
        return subprocess.Popen(command, cwd="/", env=self.settings, stdout=subprocess.PIPE, text=True)

    def prefect(self, *arguments: str) -> str:
        """The output of one of Prefect's own commands."""
        command = [str(BIN / "prefect"), *arguments]
        done = subprocess.run(
            command, cwd="/", env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def get(self, path: str, body: Any = None) -> Any:
        """The answer of the server's API; a body makes it a POST."""
        answer = self.ask(path, body, self.token)
        assert answer.is_success, answer.text
        return answer.json()

    @property
    def token(self) -> str:
        return (self.home / "services" / "token").read_text()

    def ask(self, path: str, body: Any = None, token: str = "", **headers: str) -> httpx.Response:
        """The raw answer to a request with this token; a POST has the header against forged requests."""
        plain: Any = {"base_url": self.url, "verify": False}  # reading the world's certificates takes 40 ms an answer
        with httpx.Client(**plain, headers=headers, timeout=60) as client:
            if token:
                client.headers["authorization"] = f"Basic {base64.b64encode(token.encode()).decode()}"
            if body is None:
                return client.get(path)
            if token and "prefect-csrf-token" not in client.headers:
                client.headers["prefect-csrf-client"] = str(uuid.uuid4())
                granted = client.get("/csrf-token", params={"client": client.headers["prefect-csrf-client"]})
                client.headers["prefect-csrf-token"] = granted.json()["token"]
            return client.post(path, json=body)

    def start_run(self, overrides: list[str]) -> str:
        """The id of a new run of the deployment `sft`."""
        model = [f"model={self.model}"] if self.model else []
        parameter = f"overrides={json.dumps([*model, *overrides])}"
        printed = self.prefect("deployment", "run", "alignment/sft", "--param", parameter)
        return next(word for word in printed.split() if word.count("-") == 4)

    def states(self, run_id: str) -> list[tuple[str, datetime]]:
        listed = self.get(f"/flow_run_states/?flow_run_id={run_id}")
        return [(state["name"], datetime.fromisoformat(state["timestamp"])) for state in listed]

    def state(self, run_id: str) -> str:
        return self.states(run_id)[-1][0]

    def pid(self, service: str) -> int:
        """The service's own process, below its supervisor."""
        state = self.align("status")["services"]
        supervisor = next(entry["pid"] for entry in state["services"] if entry["name"] == service)
        children = [child for child in psutil.Process(supervisor).children() if child.status() != psutil.STATUS_ZOMBIE]
        return next(child.pid for child in children if SIGNS[service] in " ".join(child.cmdline()))
