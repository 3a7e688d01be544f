"""Shared by all tests: their order, the `align` command, tiny real models, and a private Ray with its actors."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest

from alignment_core.artifacts import Store, open_store
from alignment_core.execution.machines import WarmMachines
from alignment_core.recipes import ResourcesConfig, ScratchModel
from tests import preloaded
from tests.align import Align, align_here, prefect_server, run_align
from tests.servers.s3 import S3Server

# A busy machine takes longer than 200 ms for an example that takes 10 alone.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

# A suite started in the background of a script inherits an ignored SIGINT, and so would the programs that it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

TinyModel = Callable[..., Path]
Machines = Callable[..., WarmMachines]


def kept(config: pytest.Config, name: str) -> Path:
    """A folder that all workers and later sessions share."""
    assert config.cache is not None
    return Path(config.cache.mkdir(name))


def pytest_configure(config: pytest.Config) -> None:
    """Let all homes share what vLLM keeps of the architectures it has seen (to look at a new one takes ten seconds), and
    the Rays that tests start themselves a token."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(kept(config, "vllm")))
    token = kept(config, "ray") / "auth_token"
    token.write_text("0" * 64)
    os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(token))  # Ray itself would write one to ~/.ray
    if not hasattr(config, "workerinput"):  # workers of xdist inherit the environment
        preloaded.preload()


WARM = {"machines": ("machines: Any", "run: RunRl"), "services": ("services: Services",)}
"""Slow fixtures that serve many files, and how tests request them: a single worker runs all of these files."""

WARM_AT_ONCE = 4
"""Number of settings whose actors stay warm."""


@functools.cache
def group_of(file: Path) -> str:
    """The unit of work of a worker: a file, because of its fixtures, or all files that share a warm fixture."""
    text = file.read_text()
    return next((name for name, hints in WARM.items() if any(hint in text for hint in hints)), str(file))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups go to the workers in the order of the tests. (xdist's own marks for groups do nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start actors are slow. The longest begin first: files over a warm fixture, then files with slow tests.
    Exhaustive ones run only where ``-m`` names them."""
    for item in items:
        if "machines" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = [*WARM, True, False]
    items.sort(key=lambda item: order.index(group if (group := group_of(item.path)) in WARM else item.path in slow))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say a figure that is no assertion: the suite's summary shows it, also from a test that another process runs."""
    return lambda text: record_property("measured", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the measurements of tests."""
    ended = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in ended if getattr(report, "when", None) == "call"]
    measurements = [
        f"{report.nodeid}: {text}" for report in calls for name, text in report.user_properties if name == "measured"
    ]
    if measurements:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(measurements))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    server.make_bucket("bucket")
    yield server
    server.end()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of a server that the environment names; tests use separate prefixes."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return "bucket"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new store in a folder."""
    return open_store(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ALIGN_HOME of this test's own."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 1 MiB and 64 names."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> list[Path]:
    """Use up all bytes and names of a file system; returns the files."""
    taken = []
    with contextlib.suppress(OSError):
        for number in range(1000):
            taken.append(disk / f"taken-{number}")
            with taken[-1].open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
    return [path for path in taken if path.exists()]


@pytest.fixture(scope="session")
def migrated(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database of this Prefect's: to make one takes ten seconds, so all workers and later sessions share it."""
    folder = kept(pytestconfig, "prefect")
    database = folder / f"{version('prefect')}.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            home = tmp_path_factory.mktemp("migrated")
            prefect = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_LOGGING_LEVEL": "CRITICAL"}
            subprocess.run(prefect, env=environment, check=True, capture_output=True, timeout=120)
            shutil.copyfile(home / "prefect.db", folder / "new.db")
            (folder / "new.db").rename(database)
    return database


@pytest.fixture(scope="session")
def prefect_api(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One Prefect server for all small runs of a worker: the environment that names it."""
    home = tmp_path_factory.mktemp("prefect")
    (home / "prefect").mkdir()
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    with prefect_server(home) as variables:
        yield variables


@pytest.fixture(scope="session")
def align(prefect_api: dict[str, str]) -> Align:
    """``align(home, "run", …, "--json")`` as a user runs it, over the shared server; without Prefect, in this process."""

    def run(home: Path, *arguments: str, expect: int = 0, **options: Any) -> dict[str, Any]:
        if arguments[0] in ("run", "resume", "generate"):
            return run_align(home, *arguments, expect=expect, **{**prefect_api, **options})
        done = align_here(home, *arguments, "--json")
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The folder of a 0.1M-parameter model with random weights; equal arguments give the same folder."""
    models: dict[tuple[str, bool, int], Path] = {}

    def make(architecture: Literal["llama", "qwen2"] = "llama", tied: bool = True, seed: int = 1) -> Path:
        import torch

        from alignment_core.models.scratch import create_model

        torch.set_num_threads(1)  # models this small are 5 times slower where threads wait for each other
        key = (architecture, tied, seed)
        if key not in models:
            shape = ScratchModel(
                architecture=architecture,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,  # 32 wide: the least that vLLM's attention takes on a CPU
                num_key_value_heads=1,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
            )
            models[key] = tmp_path_factory.mktemp("model") / f"{architecture}-{'tied' if tied else 'untied'}-{seed}"
            create_model(shape, None, seed, models[key])
        return models[key]

    return make


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """Warm machines with so many trainer ranks, all over one Ray; actors start when a test first needs them, and are ended
    once four other settings were used more recently (each actor takes half a gigabyte); a test that keeps the machines starts
    them again."""
    temporary = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # a short path, for Ray's sockets
    machines_of: dict[str, WarmMachines] = {}
    usual = {
        "device": "cpu",
        "engines": 1,
        "threads": 1,
        "kv_cache_mib": 16,
        "zero_stage": 1,
        "wait_timeout_seconds": 120,
    }

    def of_world(world: int, **resources: Any) -> WarmMachines:
        config = ResourcesConfig(**{**usual, "trainers": world, **resources})
        name = config.model_dump_json()
        requested = machines_of.pop(name) if name in machines_of else WarmMachines(config, temporary)
        machines_of[name] = requested  # the last
        for machines in list(machines_of.values())[:-WARM_AT_ONCE]:
            if machines.actors.ray is not None:
                machines.actors.end_actors()
        return requested

    yield of_world
    connected = [machines for machines in machines_of.values() if machines.actors.ray is not None]
    for machines in connected[:1]:
        machines.close()  # ends Ray, and with it the actors of all
    shutil.rmtree(temporary, ignore_errors=True)
