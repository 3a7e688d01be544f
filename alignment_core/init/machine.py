"""What of this machine decides a first recipe: GPUs or not, and how much memory a model may take."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import psutil

from alignment_core.doctor.machine import SECONDS
from alignment_core.machine_memory import cgroup_limit
from alignment_core.processes import inherited

FULL_BYTES = 16
"""Of memory for each parameter that is trained: weights, gradient, and AdamW's moments (with fp32 copies in bf16)."""
SHARE = 0.6
"""Of the memory that these may take; activations and engines need the rest."""


@dataclass(frozen=True)
class Machine:
    """The devices that trainers would use."""

    gpus: int
    memory: int
    """Bytes, of all GPUs or of this computer."""

    @property
    def words(self) -> str:
        """For people."""
        place = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} with" if self.gpus else "no GPU,"
        return f"{place} {self.memory / 2**30:.0f} GiB of memory"

    def holds(self, parameters: int, bytes_each: float = FULL_BYTES) -> bool:
        """Whether training so many parameters fits, at so many bytes for each."""
        return parameters * bytes_each <= SHARE * self.memory


def this_machine() -> Machine:
    """The GPUs, if torch is built for them, else the processors."""
    if sizes := _gpus():
        return Machine(len(sizes), sum(sizes))
    total = psutil.virtual_memory().total
    return Machine(0, min(total, cgroup_limit() or total))


def _gpus() -> list[int]:
    """Bytes of each GPU, as the driver says; torch is not imported."""
    with suppress(metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):
            return []
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(query, capture_output=True, env=inherited(), text=True, timeout=SECONDS, check=False)
        return _visible([int(line) << 20 for line in done.stdout.split() if line.isdigit()])
    return []


def _visible(sizes: list[int]) -> list[int]:
    """Those of the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return sizes
    chosen = [one.strip() for one in named.split(",") if one.strip() not in ("", "-1")]
    if all(one.isdigit() for one in chosen):
        return [sizes[int(one)] for one in chosen if int(one) < len(sizes)]
    return sizes[: len(chosen)]  # by their names, of which nobody knows the memory here
