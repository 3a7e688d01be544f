"""A Slurm allocation of several nodes on this machine: stand-ins for srun and scontrol, as Slurm needs daemons and a cluster.

A node is an address of loopback, folders that are its local disk at the paths of ALIGN_HOME and of Ray's temporary files, and
the processes that srun started there. The batch script runs beside the first node, which has the paths themselves.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parents[2] / "deployments" / "slurm" / "align.sbatch"
FOLDER = "STAND_IN_FOLDER"
OF_A_NODE = ["--num-cpus=2", "--object-store-memory=134217728"]


class Allocation:
    """Nodes named node1, node2, …, the last of which may be lost."""

    def __init__(self, nodes: int, home: Path, variables: dict[str, str]) -> None:
        """``home``: the path of ALIGN_HOME on every node. ``variables``: what the job has in its environment."""
        self.folder, self.home = Path(tempfile.mkdtemp(prefix="s", dir="/tmp")), home
        self.nodes = [f"node{number + 1}" for number in range(nodes)]
        self.variables = variables
        home.mkdir(parents=True, exist_ok=True)
        commands = self.folder / "bin"
        commands.mkdir()
        for name in ("srun", "scontrol"):
            command = commands / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} {name} "$@"\n')
            command.chmod(0o755)

    def submit(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        """The batch script with these arguments, and these variables in place of an allocation's."""
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {
            **os.environ,
            **self.variables,
            "PATH": path,
            "ALIGN_HOME": str(self.home),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(self.nodes),
            FOLDER: str(self.folder),
            **changes,
        }
        with self.log.open("a") as log:
            return subprocess.Popen(
                [str(SCRIPT), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        """What the script and the nodes print on stderr."""
        return self.folder / "log"

    @property
    def requeued(self) -> bool:
        """Whether the job asked Slurm to be queued again."""
        return (self.folder / "requeued").exists()

    def local_disk(self, node: str) -> Path:
        """What a node has at the path of ALIGN_HOME."""
        return self.home if node == self.nodes[0] else self.folder / "disks" / node

    def lose(self, node: str, forever: bool = False) -> None:
        """End all processes of a node at once. srun notices, and fails from then on if the node is lost ``forever``."""
        if forever:
            (self.folder / f"{node}.lost").touch()
        step = psutil.Process(int((self.folder / f"{node}.pid").read_text()))
        for process in [*step.children(recursive=True), step]:
            process.send_signal(signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """The live processes of all nodes and of the batch script."""
        return [process for process in psutil.process_iter() if self._is_of_the_job(process)]

    def _is_of_the_job(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(FOLDER) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def end(self) -> None:
        """End the remaining processes, as Slurm does at the end of a job."""
        while processes := self.processes():
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)


def scontrol(folder: Path, arguments: Sequence[str]) -> None:
    """``scontrol show hostnames LIST`` and ``scontrol requeue ID``."""
    match arguments:
        case ["show", "hostnames", names]:
            print("\n".join(names.split(",")))
        case ["requeue", _]:
            (folder / "requeued").touch()
        case _:
            sys.exit(f"scontrol: {arguments}")


def srun(folder: Path, arguments: Sequence[str]) -> None:
    """``srun --option=value … COMMAND``: one task on the node that ``--nodelist`` names."""
    split = next(number for number, argument in enumerate(arguments) if not argument.startswith("--"))
    options = dict(argument.partition("=")[::2] for argument in arguments[:split])
    command = list(arguments[split:])
    node, home = options["--nodelist"], os.environ["ALIGN_HOME"]
    number = int(node.removeprefix("node"))
    if (folder / f"{node}.lost").exists():
        sys.exit(f"srun: error: Node failure on {node}")
    if command[:2] == ["ray", "start"]:
        command += [f"--node-ip-address=127.0.0.{number + 1}", *OF_A_NODE]
    temporary = folder / "temporary"
    if number == 1:
        of_ray = next((part.partition("=")[2] for part in command if part.startswith("--temp-dir=")), "")
        temporary.write_text(of_ray)
    else:
        of_ray = temporary.read_text()
        disk, sockets = folder / "disks" / node, folder / "ray" / node
        for own in (disk, sockets):
            own.mkdir(parents=True, exist_ok=True)
        mounted = 'mount --bind "$1" "$2" && mount --bind "$3" "$4" && shift 4 && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mounted, "sh", str(disk), home, str(sockets), of_ray, *command]
    task = subprocess.Popen(command)
    (folder / f"{node}.pid").write_text(str(task.pid))

    def forward(number: int, _: Any) -> None:
        task.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    code = task.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    {"srun": srun, "scontrol": scontrol}[sys.argv[1]](Path(os.environ[FOLDER]), sys.argv[2:])
