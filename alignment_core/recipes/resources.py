"""Where and how fast to run. Nothing here is part of a stage's key: what it changes of a result is rounding, with few
exceptions, which docs/design.md names under Determinism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config


class ResourcesConfig(Config):
    """Placement, memory and deadlines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a GPU."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Trainers and engines share the GPUs, or each have their own. On a CPU they share the cores either way."""
    trainers: int | None = Field(None, ge=1)
    """Data-parallel trainer ranks; none means one per GPU that engines do not have to themselves, or one per CPU core up
    to 4."""
    engines: int | None = Field(None, ge=1)
    """vLLM engines; none means as many as trainers, or on the GPUs that these leave, half of all where nobody says."""
    judges: int = Field(1, ge=1)
    """Actors per reward model that scores completions during reinforcement learning."""
    environment_processes: int = Field(2, ge=1)
    """Processes that the environments of reinforcement learning are spread over."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs per engine; on a CPU, worker processes."""
    threads: int = Field(1, ge=1)
    """CPU threads per trainer rank and engine."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; none means 0 for one trainer, where there is nothing to share, and 2 for several."""
    offload_optimizer: bool = False
    """Keep optimiser states in CPU memory and step there; with ZeRO stage 1 and above (none means 2 then)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_tokens_per_microbatch: int = Field(1024, ge=16)
    """Token budget of a packed micro-batch; 1024 is best on a CPU, 8192 and more on a GPU."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Share of a GPU's memory for each engine."""
    kv_cache_mib: int = Field(256, ge=16)
    """Key-value cache of each CPU engine."""
    parity_check: Literal["first", "always", "never"] = "first"
    """When an engine that sampled from another policy before is checked: whether its log-probabilities of a few tokens are
    those of `transformers`. Each check loads a second copy of the model into the CPU memory of one engine. `first` checks
    once, after the engine's first new weights; `always` after all. Reinforcement learning compares the engines with its
    trainers in every step (`mismatch`) and needs no check."""
    progress_seconds: float = Field(60.0, gt=0)
    """Seconds between in-stage checkpoints."""
    stage_timeout_seconds: float = Field(24 * 3600.0, gt=0)
    """Deadline of one stage."""
    wait_timeout_seconds: float = Field(1800.0, gt=0)
    """Deadline of one wait for an actor, an engine or a collective."""
    stop_seconds: float = Field(20.0, ge=0)
    """Seconds that the stages of a run have to save their progress when the run is stopped."""
    reward_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of one answer of a function or endpoint that rewards, and of loading a function."""
    actor_restarts: int = Field(3, ge=0)
    """How often a stage begins again from its progress, in the same run host, after an actor or engine died."""
    stage_retries: int = Field(2, ge=0)
    """How often a stage is tried again in a new run host, after the host died or a deadline passed."""

    @model_validator(mode="after")
    def _can_offload(self) -> ResourcesConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "`offload_optimizer` needs `zero_stage` 1, 2 or 3, also with one trainer: leave it out for 2"
            )
        return self
