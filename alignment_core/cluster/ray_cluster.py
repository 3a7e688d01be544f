"""Starting a private Ray on loopback, or joining the cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from alignment_core.cluster.layout import Gpu
from alignment_core.errors import EnvironmentFault, InfrastructureError
from alignment_core.imports import uncollected

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 128 << 20
DAEMONS = ("raylet", "gcs_server")
ANSWER_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
REACH_SECONDS = 5.0
REACHED_AT_ONCE = 32
END_SECONDS = 30.0
SETUP_WORKER = Path(__file__).with_name("setup_worker.py")
IDLE_AGENT = Path(__file__).with_name("idle_agent.py")
_PYTHON_OF = "_build_python_executable_command_memory_profileable"
ALWAYS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # actors have their own environments and would not use prestarted workers
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without GPUs keeps its CUDA_VISIBLE_DEVICES
    "RAY_worker_niceness": "0",  # with Ray's default of 15 an actor gets 3 % of a core that another process uses
}
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on Linux: true loopback


def is_private() -> bool:
    """Whether Ray is started for this run alone, on this machine."""
    return not os.environ.get("RAY_ADDRESS")


def node_address() -> str:
    """The address of this actor's node for the other nodes."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def prepare_environment() -> None:
    """Set the environment variables that Ray reads on import. Call it before the first ``import ray``."""
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
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence
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
            with _started_lean(), _registered_at_once():
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

    Ray puts the driver's working folder first on the import path of every worker: a file there with the name of one of our
    modules would be executed in its place.
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
def _started_lean() -> Iterator[None]:
    """Start Ray without what costs seconds of processor time and serves nothing on one machine: its autoscaler; its API server,
    which it starts even without a dashboard; importing that server, to see whether it could start; its dashboard agent, for
    which its raylet waits; and importing Ray in every process that becomes an actor, before it does. ``ray.init`` has no
    options for these; a version of Ray with other names starts unchanged."""
    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    def nothing(*_: object, **_options: object) -> None: ...

    python_of: Any = getattr(services, _PYTHON_OF, None)

    def python(component: str, *others: Any, **options: Any) -> Any:
        """The beginning of a daemon's command, before its script. Our agent ignores that argument."""
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", str(IDLE_AGENT)]
        return python_of(component, *others, **options)

    lean: list[tuple[Any, str, Any]] = [
        (Node, "start_monitor", nothing),
        (Node, "start_api_server", nothing),
        (utils, "get_dashboard_dependency_error", lambda: ImportError("it would serve nothing")),
        (services, _PYTHON_OF, python),
        (ray_constants, "SETUP_WORKER_FILENAME", str(SETUP_WORKER)),  # absolute: Ray joins it to its folder
    ]
    before = [(owner, name, getattr(owner, name), value) for owner, name, value in lean if hasattr(owner, name)]
    for owner, name, _, value in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value, _ in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _registered_at_once() -> Iterator[None]:
    """Look for Ray's raylet every hundredth of a second. ``ray.init`` looks once, always too early, and then every 2 s. Another
    version of Ray starts unchanged, as in :func:`_started_lean`."""
    from ray._private import services, state

    get_node = services.get_node

    def once_registered(gcs_address: str, node_id: str) -> Any:
        with contextlib.suppress(AttributeError):
            nodes = state.GlobalState()
            nodes._initialize_global_state(services._get_gcs_client_options(gcs_address))
            deadline = time.monotonic() + ANSWER_SECONDS
            while not nodes.node_table() and time.monotonic() < deadline:
                time.sleep(0.01)
        return get_node(gcs_address, node_id)

    services.get_node = once_registered
    try:
        yield
    finally:
        services.get_node = get_node


def _write_token(folder: Path) -> Path:
    """A file with a token for the Ray of this run: Ray's own token file, for all clusters of a user, is world-readable."""
    file = folder / "auth_token"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(secrets.token_hex(32))
    return file


def daemon_that_dies() -> str:
    """Wait until one of Ray's daemons that this process started has ended; returns its name.

    Without its daemons Ray answers late or never, and it cannot be started again in this process.
    """
    import psutil

    names = {child.pid: child.name() for child in psutil.Process().children() if child.name() in DAEMONS}
    watched = {os.pidfd_open(pid): name for pid, name in names.items()}
    ready, _, _ = select.select(list(watched), [], [])
    return watched[ready[0]]


def _check_answers(address: str) -> None:
    """Raise OSError if no server listens there: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), ANSWER_SECONDS).close()


def other_nodes(ray: Any) -> list[str]:
    """Ray's ids of the cluster's nodes beside this one.

    A node that cannot be reached is left out with a warning: after a loss Ray calls it alive for another quarter of a minute,
    and an actor that is started there waits for so long, and dies.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    with ThreadPoolExecutor(REACHED_AT_ONCE) as pool:
        listen = list(pool.map(lambda node: _listens(node["NodeManagerAddress"], node["NodeManagerPort"]), nodes))
    for node, listens in zip(nodes, listen, strict=True):
        if not listens:
            log.warning(
                "Ray's node %s is left out: nothing accepts connections at %s:%d, the address of its raylet",
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["NodeManagerPort"],
            )
    return sorted(node["NodeID"] for node, listens in zip(nodes, listen, strict=True) if listens)


def _listens(host: str, port: int) -> bool:
    """Whether a server, such as a node's raylet, accepts connections."""
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError:
        return False
    return True


def here_first(ray: Any) -> list[str]:
    """Ray's ids of all live nodes of the cluster, this one first."""
    return [ray.get_runtime_context().get_node_id(), *other_nodes(ray)]


def gpus(ray: Any) -> int:
    """GPUs of the whole cluster."""
    return sum(gpus_by_node(ray))


def gpus_by_node(ray: Any) -> list[int]:
    """GPUs of each live node of the cluster that has any."""
    of_nodes = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return [count for count in of_nodes if count]


def gpu_models(ray: Any) -> list[str]:
    """Ray's names of the GPU models of the whole cluster."""
    prefix = "accelerator_type:"
    return sorted(name.removeprefix(prefix) for name in ray.cluster_resources() if name.startswith(prefix))


def reserve_gpus(ray: Any, count: int, waits: Callable[[str | None], None] = lambda _: None) -> Any:
    """A placement group with one GPU per bundle, on as few machines as possible.

    ``waits`` is called as that of :class:`~alignment_core.execution.scheduling.Ticket` while other runs have them.
    """
    group = ray.util.placement_group([{"GPU": 1}] * count, strategy="PACK")
    reported = None
    try:
        while not group.wait(ASK_AGAIN_SECONDS):
            free = int(ray.available_resources().get("GPU", 0))
            reason = f"{count} GPUs of the Ray cluster: {free} of {gpus(ray)} are free"
            if reason != reported:
                waits(reason)
                reported = reason
        if reported is not None:
            waits(None)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def reserved_gpus(ray: Any, group: Any) -> list[Gpu]:
    """The GPUs of a placement group with one per bundle. Ray numbers bundles without regard to their nodes."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [Gpu(node, bundle) for bundle, node in nodes.items()]


def actor_processes() -> list[psutil.Process]:
    """The processes of the actors of a private Ray, with their children; Ray sets the titles of its workers."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::") and not re.match(r"ray::(IDLE|\w+Agent)$", title):  # Ray's own
                processes += [process, *process.children(recursive=True)]
    return processes


def wait_until_ended(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended, which frees their GPU memory. Raises InfrastructureError if one does not end."""
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    if alive:
        raise InfrastructureError(f"{len(alive)} actors did not end within {END_SECONDS:g} seconds")
