"""The GPUs and the memory of this machine, which decide precision, batch and LoRA of a first recipe."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import psutil

from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.doctor.machine import gpus, torch_is_for_cpus
from alignment_core.errors import first_line
from alignment_core.machine_memory import cgroup_limit


@dataclass(frozen=True)
class Machine:
    """The devices for training."""

    gpus: int
    memory: int
    """Bytes, of all GPUs or else of this computer."""
    problem: str = ""
    """Why the driver did not list all GPUs."""
    cpu_multiplies_bf16: bool = False

    @property
    def words(self) -> str:
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} with" if self.gpus else "no GPU,"
        return f"{gpus} {self.memory / 2**30:.0f} GiB of memory"

    @property
    def precision(self) -> str:
        """What makes bf16 faster than fp32 here; empty if nothing does."""
        if self.gpus:
            return f"this machine has {self.words}"
        return "this processor multiplies bf16 several times as fast as fp32" if self.cpu_multiplies_bf16 else ""


def this_machine() -> Machine:
    sizes, problem = _gpus()
    if sizes:
        return Machine(len(sizes), sum(sizes), problem)
    total = psutil.virtual_memory().total
    return Machine(0, min(total, cgroup_limit() or total), problem, cpu_multiplies_bf16())


def _gpus() -> tuple[list[int], str]:
    """Bytes of each GPU that a run would use, and why the driver did not list all."""
    if torch_is_for_cpus():
        return [], ""
    try:
        listed = gpus("memory.total")
    except (subprocess.TimeoutExpired, OSError) as error:
        return [], first_line(error)
    if listed is None:
        return [], ""
    sizes = [line.split()[0] for line in listed.gpus]  # `81559 MiB`, or `[N/A]`
    return _visible([int(size) << 20 for size in sizes if size.isdigit()]), listed.problem


def _visible(sizes: list[int]) -> list[int]:
    """The GPUs in CUDA_VISIBLE_DEVICES."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return sizes
    names = [name.strip() for name in variable.split(",") if name.strip() not in ("", "-1")]
    if all(name.isdigit() for name in names):
        return [sizes[int(name)] for name in names if int(name) < len(sizes)]
    return sizes[: len(names)]  # UUIDs: which of the sizes are theirs is unknown here
