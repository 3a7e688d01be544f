"""A Ray cluster of several nodes on this machine, each with a separate ALIGN_HOME that the others cannot see."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.processes import wait_until
from tests.servers.halts import Halt

RAY = str(Path(sys.executable).with_name("ray"))
TOKEN = {"RAY_AUTH_MODE": "token"}


class RayNodes:
    """The first node is the head, on which drivers run; every node has another address on loopback."""

    def __init__(self, variables: dict[str, str]) -> None:
        """``variables``: what the processes of all nodes have in their environment, such as credentials."""
        self.folder, self.variables = Path(tempfile.mkdtemp(prefix="r", dir="/tmp")), variables
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    def environment(self) -> dict[str, str]:
        """Variables for a driver."""
        return {**self.variables, **TOKEN, "RAY_ADDRESS": self.address}

    def start(
        self,
        home: Path,
        hidden: Sequence[Path] = (),
        instead: Mapping[Path, Path] | None = None,
        halt: Halt | None = None,
        place: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Add a node that has this ALIGN_HOME, sees nothing in the ``hidden`` folders, and others ``instead`` of some.

        ``halt``: of its processes, under the name of its home. ``place``: the number of a node that ended, whose address it
        gets; by default it has a new one.
        """
        address = f"127.0.0.{(len(self.nodes) if place is None else place) + 2}"
        command = [RAY, "start", "--block", f"--node-ip-address={address}", "--num-cpus=2"]
        command += ["--object-store-memory=134217728", "--disable-usage-stats"]
        if not self.nodes:
            command += ["--head", "--port=0", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        else:
            command += [f"--address={self.address}"]
        mounts = [["mount", "-t", "tmpfs", "none", str(folder)] for folder in hidden]
        mounts += [["mount", "--bind", str(other), str(folder)] for folder, other in (instead or {}).items()]
        if mounts:
            command = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                " && ".join([*map(shlex.join, mounts), f"exec {shlex.join(command)}"]),
            ]
        environment = {**os.environ, **self.variables, **TOKEN, "ALIGN_HOME": str(home)}
        environment.pop("RAY_ADDRESS", None)
        if halt is not None:
            first = self.folder / f"path-{len(self.nodes)}"
            halt.install(first, home.name)
            environment["PYTHONPATH"] = os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = self.folder / f"node-{len(self.nodes)}.log"
        with log.open("wb") as file:
            node = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        self.nodes.append(node)
        if not self.address:
            started = self.folder / "ray_current_cluster"
            assert wait_until(started.exists, 60), log.read_text()
            self.address = started.read_text().strip()
        assert wait_until(lambda: "started" in log.read_text().lower(), 60), log.read_text()
        return node

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End all processes of a node at once. The head learns of it from closed connections; of a machine that loses its power
        Ray learns only after about 15 s."""
        processes = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # a child that has ended meanwhile
                process.send_signal(signal.SIGKILL)
        node.wait()

    def end(self) -> None:
        """End the remaining processes."""
        for node in self.nodes:
            if node.poll() is None:
                self.kill(node)
        for process in psutil.process_iter():
            try:
                if any(str(self.folder) in part for part in process.cmdline()):
                    process.kill()
            except psutil.Error:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)
