"""Where and how fast to run. Nothing here but the options that are passed through is part of a stage's key: what it changes of
a result is rounding, with few exceptions, which docs/design.md names under Determinism."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import Anything

OURS_OF_DEEPSPEED = (
    *(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
    ),
    *("gradient_clipping", "optimizer", "scheduler", "bf16", "fp16", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "zero_optimization.stage", "zero_optimization.offload_optimizer"),
    "zero_optimization.overlap_comm",
)
"""Options of DeepSpeed that this project sets itself."""
OURS_OF_VLLM = (
    *(
        "model",
        "tokenizer",
        "skip_tokenizer_init",
        "trust_remote_code",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "seed",
    ),
    *("logprobs_mode", "worker_extension_cls", "disable_log_stats", "use_tqdm_on_load", "enforce_eager", "block_size"),
    *("enable_chunked_prefill", "tensor_parallel_size", "distributed_executor_backend", "gpu_memory_utilization"),
    *("enable_sleep_mode", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank"),
)
"""Arguments of ``vllm.LLM`` that this project sets itself."""


def _given(options: dict[str, Any]) -> bool:
    return not options


class ResourcesConfig(Config):
    """Placement, memory and deadlines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA if there is a GPU."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Trainers and engines share the GPUs (`colocated`), or have GPUs of their own (`disaggregated`). On a CPU they
    share the cores either way."""
    trainers: int | None = Field(None, ge=1)
    """Number of data-parallel trainer ranks. Default: one per GPU or, if disaggregated, per GPU that the engines leave;
    on a CPU, one per core, up to 4."""
    engines: int | None = Field(None, ge=1)
    """Number of vLLM engines. Default: one per trainer; if disaggregated, the GPUs that trainers leave, and half of all
    GPUs if neither number is given."""
    judges: int = Field(1, ge=1)
    """Number of actors per reward model that scores completions during reinforcement learning."""
    reward_processes: int | None = Field(None, ge=1)
    """Number of processes for each verifier or reward function in Python, on each node; they start when completions wait. A
    function that keeps state between calls keeps it in each process separately: use 1 if that matters. Default: one per
    CPU core."""
    environment_processes: int = Field(2, ge=1)
    """Number of processes over which the environments of reinforcement learning are distributed."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs per engine; on a CPU, worker processes."""
    threads: int = Field(1, ge=1)
    """CPU threads per trainer rank and engine."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage. Default: 0 for one trainer, where there is nothing to partition, and 2 for several."""
    offload_optimizer: bool = False
    """Keep optimiser states in CPU memory and take the optimiser step there. Needs ZeRO stage 1 or above (default 2 in
    this case)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_tokens_per_microbatch: int = Field(2048, ge=16)
    """Token budget of a packed micro-batch; 2048 is best on a CPU, 8192 and more on a GPU."""
    attention: Literal["auto", "sdpa"] = "auto"
    """Attention of models that train or score. `auto`: sequences of a micro-batch that begin alike share the computation of
    their common prefix, if the model's attention is of the plain causal kind (on CUDA: by FlexAttention, if a trial when the
    model is loaded finds it right); otherwise as `sdpa`: the attention of `transformers`, each sequence for itself."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Fraction of a GPU's memory for each engine."""
    kv_cache_mib: int = Field(256, ge=16)
    """Size of each CPU engine's key-value cache, in MiB. It must hold the longest sequence that is sampled; a judge that a
    stage serves has the longest context that it can hold."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] | None = Field(
        None, exclude_if=lambda rank: rank is None
    )
    """Give engines the adapters of `rl.training.lora` as they are, of this rank at most, by vLLM's LoRA support: after a step
    only they travel, and bf16 rounds nothing of them away; a token takes longer. Default: engines get merged weights, as they
    always do with DoRA and `modules_to_save`, which vLLM cannot add."""
    parity_check: Literal["first", "always", "never"] = "first"
    """When to check, after an engine received new weights, that its log-probabilities of a few tokens match those of
    `transformers`. Each check loads a second copy of the model: onto the GPU of one engine if it has room, otherwise into
    its CPU memory. `first` checks once, after the engine's first update; `always` after every update. Reinforcement
    learning needs no such check: it compares engines and trainers in every step (`mismatch`)."""
    deepspeed: dict[str, Anything] = Field({}, exclude_if=_given)
    """Further options of DeepSpeed, as its configuration file has them, such as `{zero_optimization: {offload_param: {device:
    cpu}}}`. DeepSpeed checks them; they are part of the keys of stages that train. `env:NAME` stands for the
    value of an environment variable."""
    engine_options: dict[str, Anything] = Field({}, exclude_if=_given)
    """Further arguments of `vllm.LLM` for all engines, such as `{max_num_batched_tokens: 8192}`. vLLM checks them; they are
    part of the keys of stages that sample. `env:NAME` stands for the value of an environment variable."""
    progress_seconds: float = Field(60.0, gt=0)
    """Seconds between in-stage checkpoints."""
    progress: Literal["local", "store"] = "local"
    """Where in-stage checkpoints are kept: on this machine, or also in the store (whole weights in safetensors), so that a run
    whose machine is gone resumes elsewhere, on any number of trainers and at any ZeRO stage."""
    stage_timeout_seconds: float = Field(24 * 3600.0, gt=0)
    """Deadline of one stage."""
    wait_timeout_seconds: float = Field(1800.0, gt=0)
    """Deadline of a single wait for an actor, an engine or a collective."""
    stop_seconds: float = Field(20.0, ge=0)
    """Seconds that stages have to save their progress when the run is stopped."""
    reward_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of a call of a verifier, reward function or endpoint, and of loading a function."""
    actor_restarts: int = Field(3, ge=0)
    """How often a stage restarts from its progress, in the same run host, after an actor or engine died."""
    stage_retries: int = Field(2, ge=0)
    """How often a stage is retried in a new run host, after the host died or a deadline passed."""

    @property
    def passed(self) -> dict[str, dict[str, Any]]:
        """Options that are passed through, by the package that takes them."""
        options = {"deepspeed": self.deepspeed, "vllm": self.engine_options}
        return {package: one for package, one in options.items() if one}

    @model_validator(mode="after")
    def _passes_what_is_not_ours(self) -> ResourcesConfig:
        for field, ours in (("deepspeed", OURS_OF_DEEPSPEED), ("engine_options", OURS_OF_VLLM)):
            options: dict[str, Any] = getattr(self, field)
            inner = {f"{name}.{part}" for name, one in options.items() if isinstance(one, dict) for part in one}
            if taken := sorted({*options, *inner} & {*ours}):
                raise ValueError(
                    f"`{field}.{taken[0]}` is set by what the recipe says elsewhere or must stay as it is: remove it"
                )
        return self

    @model_validator(mode="after")
    def _loads_no_pickles(self) -> ResourcesConfig:
        if (form := self.engine_options.get("load_format")) in ("pt", "npcache"):
            raise ValueError(f"`engine_options.load_format: {form}` reads pickles, which can run code: remove it")
        return self

    @model_validator(mode="after")
    def _can_offload(self) -> ResourcesConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "`offload_optimizer` needs `zero_stage` 1, 2 or 3, even with one trainer: leave `zero_stage` out for 2"
            )
        return self
