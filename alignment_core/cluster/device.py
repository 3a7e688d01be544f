"""Everything in which a CPU and a CUDA machine differ, in one object."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import ResourcesConfig

MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """How actors are placed and started on this kind of device."""

    kind: Literal["cpu", "cuda"]
    count: int
    """GPUs, or CPU cores."""

    @classmethod
    def detect(cls, wanted: Literal["auto", "cpu", "cuda"]) -> Device:
        """The device that the recipe wants. Raises EnvironmentFault if it wants CUDA and there is none."""
        gpus = _gpus() if wanted != "cpu" else 0
        if wanted == "cuda" and not gpus:
            raise EnvironmentFault("resources.device is `cuda`, but no GPU is visible; use `auto` or `cpu`")
        if gpus:
            return cls("cuda", gpus)
        return cls("cpu", len(os.sched_getaffinity(0)))

    @property
    def backend(self) -> str:
        """Name of the collective backend."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def torch_device(self) -> str:
        """Device string for this actor's tensors; Ray shows an actor only its own GPU."""
        return self.kind

    def local_rank(self, rank: int) -> int:
        """Index of a trainer rank's device as its own process sees it."""
        return 0 if self.kind == "cuda" else rank

    def trainers(self, resources: ResourcesConfig) -> int:
        """Data-parallel trainer ranks."""
        return resources.trainers or (self.count if self.kind == "cuda" else min(self.count, 4))

    def engines(self, resources: ResourcesConfig) -> int:
        """vLLM engines."""
        return resources.engines or max(1, self.trainers(resources) // resources.tensor_parallel_size)

    def actor_options(self, role: Literal["trainer", "engine"], resources: ResourcesConfig) -> dict[str, Any]:
        """Ray options of one actor. Trainers and engines share devices, so that each claims a part of one."""
        if self.kind == "cpu":
            return {"num_cpus": 0}
        share = 0.5 if role == "trainer" else 0.45
        return {"num_cpus": 1, "num_gpus": share if role == "trainer" or resources.tensor_parallel_size == 1 else 0}

    def trainer_environment(self, resources: ResourcesConfig) -> dict[str, str]:
        """Environment variables of a trainer's process."""
        shared = {"OMP_NUM_THREADS": str(resources.threads), "TOKENIZERS_PARALLELISM": "false"}
        if self.kind == "cuda":
            return shared
        return {**shared, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}

    def engine_environment(self, resources: ResourcesConfig) -> dict[str, str]:
        """Environment variables of an engine's process."""
        shared = {
            "OMP_NUM_THREADS": str(resources.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if resources.tensor_parallel_size == 1 else "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CONFIGURE_LOGGING": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.kind == "cuda":
            return shared
        # Without TORCHDYNAMO_DISABLE the first call compiles for seconds even in eager mode.
        return {
            **shared,
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def engine_options(self, resources: ResourcesConfig) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that depend on the device."""
        if self.kind == "cuda":
            return {
                "gpu_memory_utilization": resources.gpu_memory_utilization,
                "tensor_parallel_size": resources.tensor_parallel_size,
            }
        # Blocks of 32: the default of 128 never caches a short prompt. A prompt in chunks breaks seeded sampling: vLLM
        # then rewinds the random generator, which a CPU generator cannot do.
        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": resources.kv_cache_mib * MIB,
            "block_size": 32,
            "enable_chunked_prefill": False,
        }


def _gpus() -> int:
    """Visible NVIDIA GPUs, counted without importing torch."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except FileNotFoundError:
        return 0
