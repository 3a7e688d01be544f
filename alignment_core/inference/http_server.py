"""vLLM's OpenAI-compatible server on a model: its command, and one that runs for as long as a context lasts."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from alignment_core.errors import EnvironmentFault
from alignment_core.inference.options import BY_DEVICE
from alignment_core.models.saving import check_loadable, checkpoint_dtype
from alignment_core.processes import inherited
from alignment_core.recipes.sections.resources import ResourcesConfig

START_SECONDS = 600.0
"""For which it may load its model."""
STOP_SECONDS = 20.0
SHOWN = 2000
"""Last characters of its log that an error quotes."""


def server_of(
    folder: str, name: str, host: str, port: int, resources: ResourcesConfig | None = None
) -> tuple[list[str], dict[str, str]]:
    """The server's command, and its environment, as our own engines have theirs."""
    import torch

    from alignment_core.cluster.device import Device, Place

    resources = resources or ResourcesConfig()
    device = Device.detect(resources.device, torch.cuda.device_count())
    environment = device.engine_environment(resources, Place())
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the server's engine is a process of its own
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    found: dict[str, Any] = {**BY_DEVICE.get(device.kind, {}), **device.engine_options(resources)}
    found.pop("enable_sleep_mode", None)
    if (Path(folder) / "config.json").is_file():  # of a name on the Hub vLLM knows best
        found["dtype"] = checkpoint_dtype(check_loadable(Path(folder)))
    given = {"model": folder, "served-model-name": name, "host": host, "port": port, **found}
    flags = [word for option, value in given.items() for word in _flag(option.replace("_", "-"), value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags], environment


def _flag(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", str(value)]


@contextmanager
def served(
    folder: str, name: str, resources: ResourcesConfig | None = None, own_session: bool = False
) -> Iterator[str]:
    """Its URL on loopback, ending in ``/v1``. Raises EnvironmentFault if it does not start.

    In an ``own_session`` Ctrl-C does not reach it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, environment = server_of(folder, name, "127.0.0.1", port, resources)
    with tempfile.TemporaryFile() as log, ExitStack() as running:
        server = subprocess.Popen(
            command,
            env=inherited(**environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=own_session,
        )
        running.callback(_end, server)
        _wait(server, f"http://127.0.0.1:{port}/v1", name, log)
        yield f"http://127.0.0.1:{port}/v1"


def _wait(server: subprocess.Popen[bytes], url: str, name: str, log: IO[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/models", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    log.seek(0)
    raise EnvironmentFault(f"{name}: vLLM's server did not start:\n{log.read().decode(errors='replace')[-SHOWN:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End it with all that it started."""
    import psutil

    if server.poll() is not None:
        return
    below = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for one in psutil.wait_procs(below, timeout=5)[1]:
        one.kill()
