"""Prefect's API for a run that has no server to talk to: one of its own, on loopback, that ends with this process.

Prefect would start such a server by itself, but only after its own import, with the server's code imported here as well,
and would leave it behind when this process is killed.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import urllib.request
from contextlib import suppress

from alignment.flows import access
from alignment_core.errors import EnvironmentFault
from alignment_core.home import align_home
from alignment_core.host.subprocess_tree import Supervised, fresh_folder

START_SECONDS = 120.0
POLL_SECONDS = 0.05
KEEP_ALIVE_SECONDS = 24 * 3600
"""Idle connections stay open: Prefect's client meets a closed one with an error, and tries again only after 2 seconds."""
EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""What Prefect itself sets for the temporary servers that it starts."""


def server_command(listener: int, log_level: str) -> list[str]:
    """Prefect's server on a socket that listens already: early requests wait."""
    application = [
        "-m",
        "alignment.flows.service.prefect_server",
        "--factory",
        "alignment.flows.service.retry_503:create_app",
        "--lifespan",
        "on",
    ]
    options = ["--fd", str(listener), "--log-level", log_level, "--timeout-keep-alive", str(KEEP_ALIVE_SECONDS)]
    return [sys.executable, *application, *options]


def answers(url: str, seconds: float) -> bool:
    """Whether a server at this address says, within so many seconds, that it is well."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=seconds) as answer:
        return bool(answer.status == 200)
    return False


class PrefectApi:
    """The server, starting or started. Its database lies below ALIGN_HOME and outlives it; its token does not."""

    def __init__(self) -> None:
        home = align_home()
        self.log = home / "logs" / "prefect.log"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.url, self.token = access.url_of(port), access.new_token()
            self.server = Supervised(
                server_command(listener.fileno(), "error"),
                {**os.environ, **EPHEMERAL, **access.of_server(port, self.token)},
                self.log,
                fresh_folder(home / "tmp", "api-"),
                inherited=[listener.fileno()],
            )

    def wait(self) -> None:
        """Until it answers. Raises EnvironmentFault if it does not start."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.server.process.poll() is None:
            if answers(self.url, START_SECONDS):
                return
            time.sleep(POLL_SECONDS)
        raise EnvironmentFault(f"Prefect's own server did not start; see {self.log}")


def start_prefect_api() -> PrefectApi | None:
    """A server for this process, unless ``PREFECT_API_URL`` names one. Call it before ``import prefect``.

    What the environment says of the database is told this server alone, and forgotten here in any case.
    It ends at the exit of the interpreter, after Prefect has sent its last logs and events: what is registered first
    is called last.
    """
    api = None
    if not os.environ.get(access.URL):
        api = PrefectApi()
        atexit.register(api.server.close)
        os.environ.update(access.of_client(api.url, api.token))
    for name in access.split(os.environ)[1]:
        del os.environ[name]
    return api
