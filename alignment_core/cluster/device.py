"""All differences between a CPU and a CUDA machine, in one object."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from alignment_core.cluster.layout import ENGINE_GPU, LEARNERS, Counts, Place, gpus_apart, gpus_needed, host_of
from alignment_core.cores import physical_cores
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import GROUPS_OF_RANKS

MIB = 1 << 20
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning"}
"""Keeps deprecation warnings of libraries out of the log of a run."""
_SHORT_SPINS = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")}
"""Polls of a libgomp thread that waits for the others before it sleeps. Its default polls for milliseconds: beside one busy
process, two threads of a trainer then reach an eighth of their speed."""
ON_A_CPU = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
"""Compilation is off on a CPU: DeepSpeed and vLLM would import torch's compiler, and the first call of each compiled function
would take seconds."""
_MEMORY_KEPT = {
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1073741824")
}
"""Keeps up to 1 GiB that a weight update freed for the next one: to get it from the system again takes a third of an update."""
_FULL_FP32 = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton multiplies fp32 in TF32 by default, with ten bits of the mantissa, and vLLM has no other attention for fp32. It
passes its environment on to the workers of tensor parallelism."""
CHECKPOINTED_PARAMETERS = {"cuda": 1_500_000_000, "cpu": 50_000_000}
"""Models from this size on recompute activations unless the recipe says otherwise: on GPUs all, on CPUs the cheap ones."""
_BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@dataclass(frozen=True)
class Device:
    """Placement and start of actors on this kind of device."""

    kind: Literal["cpu", "cuda"]
    count: int
    """GPUs of all machines, or CPU cores of this one."""
    private: bool = True
    """Whether everything runs on this machine, under a Ray of its own."""
    nodes: tuple[int, ...] = ()
    """GPUs of each node; empty: all are on one."""

    @classmethod
    def detect(
        cls,
        wanted: Literal["auto", "cpu", "cuda"],
        gpus: int = 0,
        private: bool = True,
        nodes: Sequence[int] = (),
    ) -> Device:
        """The recipe's device; ``gpus`` is the number that Ray sees, ``nodes`` that of each node. Raises EnvironmentFault for
        CUDA without a GPU."""
        if _torch_is_for_cpus():
            gpus = 0
        if wanted == "cuda" and not gpus:
            raise EnvironmentFault(
                "resources.device is `cuda`, but there is no GPU that Ray and this build of torch can use; "
                "set it to `auto` or `cpu`, or install the extra `cuda`"
            )
        if gpus and wanted != "cpu":
            return cls("cuda", gpus, private, tuple(nodes))
        return cls("cpu", physical_cores(), private)

    @property
    def backend(self) -> str:
        """Name of the collective backend."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def torch_device(self) -> str:
        """Device string for this actor's tensors; an actor sees only its own GPU (:func:`~.actor.see_own_gpus`)."""
        return self.kind

    def inference_dtype(self, stored: str) -> str:
        """Float type in which engines and frozen models compute whose weights are ``stored`` in this one."""
        return inference_dtype_on_cpu(stored) if self.kind == "cpu" else stored

    def local_rank(self, rank: int) -> int:
        """Index of a trainer rank's device as its own process sees it."""
        return 0 if self.kind == "cuda" else rank

    def trainers(self, resources: ResourcesConfig) -> int:
        """Trainer ranks."""
        if self.kind == "cpu":
            # a second one would have the whole model again, and exchange gradients
            return resources.trainers or max(resources.sequence_parallel_size, resources.trainer_tensor_parallel_size)
        of_engines = self.engines(resources) * resources.tensor_parallel_size if self.engines_apart(resources) else 0
        return resources.trainers or max(1, self.count - of_engines - gpus_apart(resources))

    def engines(self, resources: ResourcesConfig) -> int:
        """vLLM engines."""
        if resources.engines:
            return resources.engines
        if self.engines_apart(resources):
            gpus = self.count - gpus_apart(resources)
            gpus = gpus - resources.trainers if resources.trainers else gpus // 2
        else:
            gpus = self.trainers(resources)
        size = resources.tensor_parallel_size
        on_one_node = sum(of_node // size for of_node in self.nodes) or gpus  # 0 if an engine is larger than any node
        return max(1, min(gpus // size, on_one_node))

    def threads(self, resources: ResourcesConfig, processes: int) -> int:
        """CPU threads of each of so many processes, which compute at the same time."""
        return resources.threads or (max(1, self.count // processes) if self.kind == "cpu" else 1)

    def trainer_threads(self, resources: ResourcesConfig, world: int, on_machine: int) -> int:
        """CPU threads of each of ``world`` trainer ranks, ``on_machine`` of which are on this machine. An offloaded optimiser
        steps with all cores that it has; otherwise the GPUs compute."""
        offloads = resources.offload_optimizer or resources.models.critic.offload_optimizer
        if self.kind == "cuda" and offloads and not resources.threads:
            return max(1, physical_cores() // on_machine)
        return self.threads(resources, world)

    def _engine_threads(self, resources: ResourcesConfig) -> int:
        return self.threads(resources, self.engines(resources) * resources.tensor_parallel_size)

    def learners(self, resources: ResourcesConfig) -> int:
        """Ranks of all process groups, which compute at the same time."""
        apart = [getattr(resources.models, role).gpus for role in LEARNERS[1:] if host_of(resources, role) == role]
        return self.trainers(resources) + sum(apart)

    def take_turns(self, resources: ResourcesConfig) -> bool:
        """Whether no engine samples for a stage while the trainers work for another one: on GPUs that they share, of which each
        may need nearly all memory, and on a CPU if together they have more threads than this machine has cores. At once, their
        threads would wait for each other at every operation."""
        if self.kind == "cuda":
            return self.engines_give_way(resources)
        trainers, engines = self.learners(resources), self.engines(resources) * resources.tensor_parallel_size
        return trainers * self.threads(resources, trainers) + engines * self._engine_threads(resources) > self.count

    def engines_apart(self, resources: ResourcesConfig) -> bool:
        """Whether engines have GPUs of their own."""
        return self.kind == "cuda" and resources.placement == "disaggregated"

    def engines_give_way(self, resources: ResourcesConfig) -> bool:
        """Whether engines share GPUs with trainers, so that they must free their memory whenever they do not sample."""
        return self.kind == "cuda" and not self.engines_apart(resources)

    def trainers_rest(self, resources: ResourcesConfig, max_staleness: int) -> bool:
        """Whether trainers keep all that they have in CPU memory while engines sample. Raises UserError if the recipe asks for
        it where trainers work meanwhile."""
        wanted = resources.offload_while_sampling
        if wanted and max_staleness:
            raise UserError(
                "resources.offload_while_sampling: with `rl.execution.max_staleness` above 0 trainers work while engines "
                "sample; leave out one of the two fields"
            )
        if max_staleness:
            return False
        return self.engines_give_way(resources) if wanted is None else wanted

    def counts(self, resources: ResourcesConfig) -> Counts:
        """Ranks and engines of a run."""
        trainers, engines = self.trainers(resources), self.engines(resources)
        return Counts(trainers, engines, resources.tensor_parallel_size, self.engines_apart(resources))

    def gpus_needed(self, resources: ResourcesConfig) -> int:
        """GPUs of a run; 0 on a CPU. Raises EnvironmentFault if there are fewer."""
        if self.kind == "cpu":
            return 0
        counts = self.counts(resources)
        for field in GROUPS_OF_RANKS:
            size = getattr(resources, field)
            if counts.trainers % size:
                raise EnvironmentFault(
                    f"resources.{field}: {size} does not divide the {counts.trainers} trainers that {self.count} GPUs have by "
                    "default; set resources.trainers to a multiple of it"
                )
        needed = gpus_needed(resources, counts)
        if needed > self.count:
            apart, fields = gpus_apart(resources), "resources.trainers, resources.engines"
            more = f", and {apart} of resources.models" if apart else ""
            fields += ", resources.models" if apart else ""
            raise EnvironmentFault(
                f"resources: {counts.trainers} trainers and {counts.engines} engines of {counts.tensor_parallel_size} GPUs, "
                f"{resources.placement}{more}, need {needed} GPUs, and there are {self.count}; lower {fields} or "
                "resources.tensor_parallel_size"
            )
        return needed

    def rounding(self, resources: ResourcesConfig, on_machine: int | None = None) -> dict[str, Any]:
        """The settings of placement that affect rounding in a stage, as provenance records them. ``on_machine`` trainers, by
        default all, are on one machine."""
        trainers = self.trainers(resources)
        models = resources.models.model_dump(exclude_defaults=True)
        return {
            "trainers": trainers,
            "engines": self.engines(resources),
            "tensor_parallel_size": resources.tensor_parallel_size,
            "threads": self.trainer_threads(resources, self.learners(resources), on_machine or trainers),
            "engine_threads": self._engine_threads(resources),
            "attention": resources.attention,
            "zero_stage": zero_stage(resources, trainers),
            **{field: size for field in GROUPS_OF_RANKS if (size := getattr(resources, field)) > 1},
            "offload_optimizer": resources.offload_optimizer,
            "max_tokens_per_microbatch": resources.token_budget,
            **({"models": models} if models else {}),
        }

    @property
    def _loopback(self) -> dict[str, str]:
        """Environment that keeps gloo's connections on the loopback interface if all actors run on this machine."""
        return {"GLOO_SOCKET_IFNAME": "lo"} if self.private else {}

    def trainer_environment(self, resources: ResourcesConfig, processes: int) -> dict[str, str]:
        """Environment variables of each of so many processes that train, or score."""
        threads = str(self.trainer_threads(resources, processes, processes))
        shared = {**QUIET, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if self.kind == "cuda":
            return shared
        return {**shared, **self._loopback, **ON_A_CPU, **_SHORT_SPINS, "DS_ACCELERATOR": "cpu"}

    def engine_environment(self, resources: ResourcesConfig, place: Place) -> dict[str, str]:
        """Environment variables of an engine's process."""
        shared = {
            **QUIET,
            # Unset, the threads of each engine would compete for all cores: an eighth of the speed on two cores.
            "OMP_NUM_THREADS": str(self._engine_threads(resources)),
            # The actor is a process of its own; another one for the engine core would import everything again, for 20 s.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CONFIGURE_LOGGING": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.kind == "cuda":
            bundles = ",".join(map(str, place.bundles))
            spread = {"VLLM_RAY_PER_WORKER_GPUS": str(ENGINE_GPU), "VLLM_RAY_BUNDLE_INDICES": bundles}
            return {**shared, **_FULL_FP32, **(spread if len(place.bundles) > 1 else {})}
        # vLLM would set OMP_NUM_THREADS of its workers itself, and bind the threads of all engines to the same cores.
        on_cpu = {**ON_A_CPU, **_SHORT_SPINS, **_MEMORY_KEPT}
        return {**shared, **self._loopback, **on_cpu, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def engine_options(self, resources: ResourcesConfig, cache_mib: int) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` about memory and placement, which depend on the device. ``cache_mib`` is for CPUs."""
        parallel: dict[str, Any] = {"tensor_parallel_size": resources.tensor_parallel_size}
        if resources.tensor_parallel_size > 1:
            parallel["distributed_executor_backend"] = "ray" if self.kind == "cuda" else "mp"
        if self.kind == "cuda":
            sleeps = self.engines_give_way(resources)
            return {
                **parallel,
                "gpu_memory_utilization": resources.engine_memory,
                "enable_sleep_mode": sleeps,
                "sleep_mode_offload_cudagraph": sleeps,  # or CUDA graphs stay on the GPU, beside the trainer
            }
        return {**parallel, "kv_cache_memory_bytes": cache_mib * MIB}


def local_gpus() -> int:
    """GPUs of this machine that torch can use. Takes a second, the import of torch, unless that is a build for CPUs."""
    if _torch_is_for_cpus():
        return 0
    import torch

    return torch.cuda.device_count()


def _torch_is_for_cpus() -> bool:
    return metadata.version("torch").endswith("+cpu")


def zero_stage(resources: ResourcesConfig, trainers: int) -> int:
    """DeepSpeed's ZeRO stage for this number of trainers."""
    if resources.zero_stage is not None:
        return resources.zero_stage
    alone = trainers == 1 and not resources.offload_optimizer  # nothing to shard or offload
    return 0 if alone else 2


def is_sharded(resources: ResourcesConfig, ranks: int) -> bool:
    """Whether each of so many ranks holds a part of a model that is not trained."""
    return zero_stage(resources, ranks) == 3


def compute_together(resources: ResourcesConfig, ranks: int) -> bool:
    """Whether so many ranks compute the forward passes of a model that is not trained together, not each on its own."""
    return is_sharded(resources, ranks) or any(getattr(resources, field) > 1 for field in GROUPS_OF_RANKS)


def recomputed_activations(
    resources: ResourcesConfig, device: Device, parameters: int
) -> Literal["all", "selective"] | None:
    """Which activations the backward pass of a model with so many parameters recomputes."""
    wanted = resources.gradient_checkpointing
    if wanted is None:
        is_large = parameters >= CHECKPOINTED_PARAMETERS[device.kind]
        wanted = is_large and (True if device.kind == "cuda" else "selective")
    return "selective" if wanted == "selective" else "all" if wanted else None


def cpu_model() -> str:
    """Name of this machine's processor in Linux; empty if unknown."""
    return next(_of_processor("model name", "Model"), platform.processor())


def cpu_multiplies_bf16() -> bool:
    """Whether this machine's processor has instructions for products of bfloat16 matrices, as Linux lists them for x86 and
    ARM; False if unknown. Without them, torch takes up to a hundred times as long as in fp32."""
    return not _BF16_INSTRUCTIONS.isdisjoint(next(_of_processor("flags", "Features"), "").split())


def inference_dtype_on_cpu(stored: str) -> str:
    """:meth:`Device.inference_dtype` on a CPU: fp32 for half precision on a processor that has no instructions for it."""
    return stored if cpu_multiplies_bf16() else "float32"


def _of_processor(*names: str) -> Iterator[str]:
    """Values of the lines with these names in Linux's description of the processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return iter(())
    return (line.partition(":")[2].strip() for line in lines if line.startswith(names))
