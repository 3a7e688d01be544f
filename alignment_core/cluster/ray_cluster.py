"""Starting a private Ray on loopback, or joining the cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from alignment_core.errors import EnvironmentFault, InfrastructureError
from alignment_core.imports import uncollected

OBJECT_STORE_BYTES = 128 << 20
DAEMONS = ("raylet", "gcs_server")
ANSWER_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
END_SECONDS = 30.0
ALWAYS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # nobody would use them: actors have an environment of their own
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor that claims no GPU keeps the variables that it was given
    "RAY_worker_niceness": "0",  # Ray's default of 15 leaves an actor 3 % of a core that any other process also wants
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on Linux: true loopback


def is_private() -> bool:
    """Whether Ray is started for this run alone, on this machine."""
    return not os.environ.get("RAY_ADDRESS")


def prepare_environment() -> None:
    """Set what Ray reads when it is imported. Call before the first ``import ray``."""
    for name, value in {**ALWAYS, **(LOOPBACK if is_private() else {})}.items():
        os.environ.setdefault(name, value)


def connect(temporary: Path) -> Any:
    """Connect this process as a Ray driver, once; return the ``ray`` module.

    Without ``RAY_ADDRESS`` a private cluster is started that ends with this process and keeps its files in
    ``temporary``. Raises InfrastructureError if Ray does not come up, EnvironmentFault if there is none at ``RAY_ADDRESS``.
    """
    prepare_environment()
    with uncollected():
        import ray

    if ray.is_initialized():
        return ray
    if is_private():
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_write_token(temporary))
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come first
    shared: dict[str, Any] = {
        "log_to_driver": True,
        "logging_level": "ERROR",
        "configure_logging": False,
        "job_config": _job_config(),
    }
    try:
        if not is_private():
            _check_answers(os.environ["RAY_ADDRESS"])
            ray.init(address=os.environ["RAY_ADDRESS"], **shared)
        else:
            with _without_idle_servers():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(temporary),
                    _node_ip_address="127.0.0.1",
                    **shared,
                )
    except Exception as error:
        if is_private():
            raise InfrastructureError(f"Ray did not start: {error}") from error
        reason = str(error.__cause__ or error).strip().splitlines()[-1]
        raise EnvironmentFault(f"no usable Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {reason}") from error
    return ray


def _job_config() -> Any:
    """Ray's configuration of a job whose workers import from the working folder only if this process does.

    Ray puts the driver's working folder first on the import path of every worker: a file there that is called like a module
    of ours would be executed in its place.
    """
    from ray.job_config import JobConfig

    class SameImportPath(JobConfig):
        _py_driver_sys_path: list[str]

        def _get_proto_job_config(self) -> Any:
            here = {os.path.abspath(entry) for entry in sys.path}
            self._py_driver_sys_path = [folder for folder in self._py_driver_sys_path if folder in here]
            return super()._get_proto_job_config()

    return SameImportPath()


@contextlib.contextmanager
def _without_idle_servers() -> Iterator[None]:
    """Ray starts without its autoscaler, which has nothing to scale on one machine, and without the server of its jobs and
    states, which it starts without a dashboard too: 1.5 s of processor each time. No option of ``ray.init`` says so; where
    a version of Ray has other names, it starts as it would by itself."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in ("start_monitor", "start_api_server") if hasattr(Node, name)}
    for name in before:
        setattr(Node, name, lambda *_, **_options: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _write_token(folder: Path) -> Path:
    """A file with a token for the Ray of this run: Ray's own for all of a user's clusters is one that anybody can read."""
    file = folder / "auth_token"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(secrets.token_hex(32))
    return file


def daemon_that_dies() -> str:
    """Wait until one of Ray's daemons that this process started has ended, and say which.

    Without them Ray answers after its own long deadlines or never, and it cannot be started again in this process.
    """
    import psutil

    names = {child.pid: child.name() for child in psutil.Process().children() if child.name() in DAEMONS}
    watched = {os.pidfd_open(pid): name for pid, name in names.items()}
    ready, _, _ = select.select(list(watched), [], [])
    return watched[ready[0]]


def _check_answers(address: str) -> None:
    """Raise OSError if nobody listens there: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), ANSWER_SECONDS).close()


def other_nodes(ray: Any) -> list[str]:
    """Ray's ids of the cluster's nodes beside this one."""
    here = ray.get_runtime_context().get_node_id()
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)


def here_first(ray: Any) -> list[str]:
    """Ray's ids of all of the cluster's nodes that live, this one first."""
    return [ray.get_runtime_context().get_node_id(), *other_nodes(ray)]


def gpus(ray: Any) -> int:
    """GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def gpu_models(ray: Any) -> list[str]:
    """Kinds of the GPUs of the whole cluster, as Ray calls them."""
    prefix = "accelerator_type:"
    return sorted(name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix))


def reserve_gpus(ray: Any, count: int, waits: Callable[[str | None], None] = lambda _: None) -> Any:
    """A placement group with one GPU a bundle, on as few machines as possible.

    ``waits`` is called as that of :class:`~alignment_core.execution.scheduling.Ticket` while other runs have them.
    """
    group, told = ray.util.placement_group([{"GPU": 1}] * count, strategy="PACK"), None
    try:
        while not group.wait(ASK_AGAIN_SECONDS):
            free = int(ray.available_resources().get("GPU", 0))
            reason = f"{count} GPUs of the Ray cluster: {free} of {gpus(ray)} are free"
            if reason != told:
                waits(reason)
                told = reason
        if told is not None:
            waits(None)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def actor_processes() -> list[psutil.Process]:
    """The processes of the actors of a private Ray, with their children; Ray names its workers after what they do."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::") and not re.match(r"ray::(IDLE|\w+Agent)$", title):  # Ray's own
                found += [process, *process.children(recursive=True)]
    return found


def wait_for_the_end(processes: Sequence[psutil.Process]) -> None:
    """Until they are gone, and with them what they held on a GPU. Raises InfrastructureError if one stays."""
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    if alive:
        raise InfrastructureError(f"{len(alive)} actors did not end within {END_SECONDS:g} seconds")
