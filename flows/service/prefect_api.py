"""A Prefect server for a run without one: on loopback, ending with this process.

Prefect can start such a server by itself, but only after its own import, with the server's code imported in this process, and
the server survives when this process is killed.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from alignment.flows import access
from alignment_core.errors import EnvironmentFault
from alignment_core.home import align_home
from alignment_core.host.subprocess_tree import Supervised, fresh_folder

START_SECONDS = 120.0
REQUEST_SECONDS = 5.0
"""A request waits in the socket until the server takes it, so a server that has ended is noticed only after so long."""
POLL_SECONDS = 0.05
KEEP_ALIVE_SECONDS = 24 * 3600
"""Idle connections stay open: on a closed one Prefect's client fails, and retries only after 2 seconds."""
EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""Prefect sets these for its own temporary servers."""


def server_command(listener: int, log_level: str) -> list[str]:
    """The command of Prefect's server on a listening socket, so that early requests wait instead of failing."""
    module, factory = "alignment.flows.service.prefect_server", "alignment.flows.service.retry_503:create_app"
    application = [sys.executable, "-m", module, "--factory", factory, "--lifespan", "on"]
    keep_alive = ["--timeout-keep-alive", str(KEEP_ALIVE_SECONDS)]
    return [*application, "--fd", str(listener), "--log-level", log_level, *keep_alive]


def wait_until_healthy(url: str, seconds: float, gone: Callable[[], bool]) -> bool:
    """Wait until the server reports its health; False after ``seconds``, or once ``gone`` says that waiting is of no use."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not gone():
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=REQUEST_SECONDS) as answer:
            if answer.status == 200:
                return True
        time.sleep(POLL_SECONDS)
    return False


class PrefectApi:
    """A running server. Its database below ALIGN_HOME outlives it, its token does not."""

    def __init__(self) -> None:
        home = align_home()
        self.log = home / "logs" / "prefect.log"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self.url = access.url_of(port)
            self.token = access.new_token()
            self.server = Supervised(
                server_command(listener.fileno(), "error"),
                {**os.environ, **EPHEMERAL, **access.of_server(port, self.token)},
                self.log,
                fresh_folder(home / "tmp", "api-"),
                inherited=[listener.fileno()],
            )

    def wait(self) -> None:
        """Wait until the server answers. Raises EnvironmentFault if it does not start."""
        if not wait_until_healthy(self.url, START_SECONDS, lambda: self.server.process.poll() is not None):
            raise EnvironmentFault(f"Prefect's own server did not start; see {self.log}")


def start_prefect_api() -> PrefectApi | None:
    """Start a server for this process, unless ``PREFECT_API_URL`` names one. Call it before ``import prefect``.

    Only the server gets the database variables; they are removed from this process in any case. The server ends at the exit of
    the interpreter, after Prefect has sent its last logs and events, because exit handlers run in reverse order.
    """
    api = None
    if not os.environ.get(access.URL):
        api = PrefectApi()
        atexit.register(api.server.close)
        os.environ.update(access.of_client(api.url, api.token))
    for name in access.split(os.environ)[1]:
        del os.environ[name]
    return api
