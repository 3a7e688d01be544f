"""Prefect's API for a run that has no server to talk to: one of its own, on loopback, that ends with this process.

Prefect would start such a server by itself, but only after its own import, with the server's code imported here as well,
and would leave it behind when this process is killed.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignment_core.artifacts import align_home
from alignment_core.errors import EnvironmentFault
from alignment_core.host.supervised import Supervised

START_SECONDS = 120.0
POLL_SECONDS = 0.05
EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""What Prefect itself sets for the temporary servers that it starts."""


class PrefectApi:
    """The server, starting or started. Its database lies below ALIGN_HOME and outlives it."""

    def __init__(self) -> None:
        home = align_home()
        self.log = home / "logs" / "prefect.log"
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:  # open from now on: early requests wait
            port = listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/api"
            uvicorn = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
            self.server = Supervised(
                [*uvicorn, "--fd", str(listener.fileno()), "--log-level", "error", "--lifespan", "on"],
                {**os.environ, **EPHEMERAL},
                self.log,
                Path(tempfile.mkdtemp(prefix="api-", dir=home / "tmp")),
                inherited=[listener.fileno()],
            )

    def wait(self) -> None:
        """Until it answers. Raises EnvironmentFault if it does not start."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.server.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=START_SECONDS) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_SECONDS)
        raise EnvironmentFault(f"Prefect's own server did not start; see {self.log}")


@contextmanager
def prefect_api() -> Iterator[PrefectApi | None]:
    """A server of this process, unless ``PREFECT_API_URL`` names one. Enter it before ``import prefect``."""
    if os.environ.get("PREFECT_API_URL"):
        yield None
        return
    api = PrefectApi()
    os.environ["PREFECT_API_URL"] = api.url
    try:
        yield api
    finally:
        del os.environ["PREFECT_API_URL"]
        api.server.close()
