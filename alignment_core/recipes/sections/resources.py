"""Placement, memory and deadlines. Only the options that are passed through are part of stage keys: the others change results
by rounding at most, with few exceptions (docs/design.md, Determinism)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config, unkeyed
from alignment_core.recipes.paths import Anything

MICROBATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Default token budgets of micro-batches, by device."""
ENGINE_MEMORY = (0.4, 0.9)
"""Default fractions of a GPU's memory for an engine: beside a trainer, and alone."""
GROUPS_OF_RANKS = ("sequence_parallel_size", "trainer_tensor_parallel_size")
"""Fields with the number of trainer ranks that compute each micro-batch together."""
OURS_OF_DEEPSPEED = (
    *(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
    ),
    *("gradient_clipping", "optimizer", "scheduler", "bf16", "fp16", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "zero_optimization.stage", "zero_optimization.offload_optimizer"),
    *("zero_optimization.overlap_comm", "tensor_parallel"),
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
        "seed",
    ),
    *("logprobs_mode", "worker_extension_cls", "disable_log_stats", "use_tqdm_on_load", "enforce_eager", "block_size"),
    *("enable_chunked_prefill", "tensor_parallel_size", "distributed_executor_backend", "gpu_memory_utilization"),
    *("max_num_seqs", "enable_sleep_mode", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank"),
    "sleep_mode_offload_cudagraph",
)
"""Arguments of ``vllm.LLM`` that this project sets itself."""


class ModelPlacement(Config):
    """GPUs for one of the models of reinforcement learning; on a CPU, processes."""

    gpus: int | None = Field(None, ge=1)
    """Number of GPUs of its own, with a rank on each."""
    colocate_with: Literal["policy", "critic", "reference"] | None = None
    """The model whose GPUs it shares; critic and reference are then in the same processes. Default: `policy`."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage; for a model that is not trained, 3 splits it over its ranks, and any other keeps it whole on each.
    Default: `resources.zero_stage`; a reward model is whole."""

    @model_validator(mode="after")
    def _has_one_place(self) -> ModelPlacement:
        if self.gpus is not None and self.colocate_with is not None:
            raise ValueError(
                "`gpus` are of its own, and `colocate_with` names those of another model: give one of them"
            )
        return self


class CriticPlacement(ModelPlacement):
    """GPUs for the critic."""

    offload_optimizer: bool | None = None
    """As `resources.offload_optimizer`, which is the default."""


class FrozenPlacement(ModelPlacement):
    """GPUs for a model that is not trained."""

    offload_parameters: bool = False
    """Keep its weights in CPU memory, from where each layer comes to the GPU when it computes. Needs `zero_stage: 3`."""

    @model_validator(mode="after")
    def _can_offload(self) -> FrozenPlacement:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("`offload_parameters` needs `zero_stage: 3` beside it")
        return self


class ModelPlacements(Config):
    """GPUs for models beside the policy, whose ranks are `resources.trainers`, and the engines."""

    critic: CriticPlacement = CriticPlacement()
    """The critic."""
    reference: FrozenPlacement = FrozenPlacement()
    """The reference of the KL, unless it is the policy without its adapters."""
    reward: FrozenPlacement = FrozenPlacement()
    """Reward models without an entry in `reward_models`: each has its own processes, and they share these GPUs."""
    reward_models: tuple[FrozenPlacement, ...] = unkeyed(())
    """GPUs of single reward models: one entry for each `reward_model` and `process_reward_model` of `rl.rewards`, in their
    order. Those without an entry are placed by `reward`."""

    def of_reward(self, number: int) -> FrozenPlacement:
        """The placement of the reward model with this number among all of them."""
        return self.reward_models[number] if number < len(self.reward_models) else self.reward

    @model_validator(mode="after")
    def _share_existing_gpus(self) -> ModelPlacements:
        places: dict[str, ModelPlacement] = {role: getattr(self, role) for role in ("critic", "reference", "reward")}
        places |= {f"reward_models.{number}": place for number, place in enumerate(self.reward_models)}
        for role, place in places.items():
            host = place.colocate_with
            if host == role or (host in ("critic", "reference") and getattr(self, host).gpus is None):
                raise ValueError(
                    f"`{role}.colocate_with: {host}` needs `{host}.gpus`: name a model with GPUs of its own"
                )
        return self


class ResourcesConfig(Config):
    """Placement, memory and deadlines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA if there is a GPU."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Trainers and engines share the GPUs and take turns (`colocated`), or have GPUs of their own (`disaggregated`). On a CPU
    they share the cores either way."""
    trainers: int | None = Field(None, ge=1)
    """Number of trainer ranks. Default: one per GPU or, if disaggregated, per GPU that the engines leave; on a CPU, one, which
    has all cores, or `sequence_parallel_size`, or `trainer_tensor_parallel_size`."""
    sequence_parallel_size: int = unkeyed(1, ge=1)
    """Number of trainer ranks that compute each micro-batch together, so that each holds the activations of a part of its
    tokens: for sequences that are too long for one device (DeepSpeed Ulysses, Jacobs et al. 2023). It must divide the number
    of `trainers`, and of GPUs of a critic or reference of its own, and the model's attention heads; for models with plain
    causal attention, and `attention: auto`. `max_tokens_per_microbatch` is shared by these ranks. On nodes of GPUs they are
    placed as those of `trainer_tensor_parallel_size`."""
    trainer_tensor_parallel_size: int = unkeyed(1, ge=1)
    """Number of trainer ranks that hold a part of each linear layer of a model, with its gradients and optimiser states, and
    compute each token together: for models that are too large for one device (Shoeybi et al. 2019, Megatron-LM). Norms,
    embeddings and heads are whole on each. It must divide the number of `trainers`, and of GPUs of a critic or reference of
    its own, and the model's attention heads, key-value heads and `intermediate_size`; for dense models of some families, with
    `optimizer: adamw` and ZeRO stages 0 to 2, without LoRA. Ranks exchange activations twice in each layer: they are placed
    on one node while any has room for all of them. Choose a size that divides the GPUs of each node, because a group for which
    no node has room crosses nodes, which is slower."""
    engines: int | None = Field(None, ge=1)
    """Number of vLLM engines. Default: as many as fit on the trainers' GPUs, each on one node; if disaggregated, as many as
    fit on those that the trainers leave, or on half of all GPUs if neither number is given."""
    models: ModelPlacements = unkeyed(ModelPlacements())
    """GPUs of the critic, the reference and reward models in reinforcement learning. Default: those of the trainers."""
    judges: int | None = Field(None, ge=1)
    """Number of actors per reward model during reinforcement learning. Default: one per GPU of its own (`models.reward.gpus`,
    or that of its entry in `models.reward_models`), or else 1."""
    reward_processes: int | None = Field(None, ge=1)
    """Maximum number of processes for each Python verifier or reward function, on each node. State that a function keeps
    between calls is separate in each process: use 1 if that matters. Default: one per CPU core, but a single one for a
    function that took more than 1 GiB of memory to load (torch and transformers take 0.35 GiB on a CPU), as it holds a
    model. Load a model where the module is imported, so that it counts and is covered by `reward_load_timeout_seconds`."""
    environment_processes: int = Field(2, ge=1)
    """Number of processes for the environments of reinforcement learning."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs per engine; on a CPU, of worker processes."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per trainer rank and engine. Default: 1 with GPUs, but for a trainer with `offload_optimizer` the number of
    usable cores, divided by that of the ranks on its machine; on a CPU the number of usable cores, divided by that of the
    trainers, or of the engines."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO stage. Default: 0 for one trainer, and 2 for several."""
    offload_optimizer: bool = False
    """Keep optimiser states in CPU memory, and run the optimiser step there. Needs ZeRO stage 1 or above (then 2 by
    default)."""
    pin_memory: bool = unkeyed(True)
    """On a GPU, keep what is offloaded to CPU memory (`offload_optimizer`, `offload_parameters`) in page-locked memory, which
    is copied faster and cannot be swapped out. Set it to false where a machine has too little of it: an offloaded optimiser
    needs 12 bytes for each parameter, divided by the ranks. Default: true, as in DeepSpeed 0.19.8."""
    overlap_comm: bool = unkeyed(False)
    """On several GPUs, sum gradients of layers while the backward pass computes those before them. Takes memory for a second
    bucket of gradients (see `deepspeed: {zero_optimization: {reduce_bucket_size: …}}`). Has no effect without ZeRO. Default:
    false."""
    offload_while_sampling: bool | None = unkeyed(None)
    """Keep the models and optimiser states of reinforcement learning's trainers in pinned CPU memory while engines on the same
    GPUs sample, which leaves room for a larger `gpu_memory_utilization`. It changes no result. Each rank needs as
    much CPU memory as it has on its GPU, and copies it there and back in each step. Needs `placement: colocated`, and
    `rl.execution.max_staleness: 0`. Default: true if both are given and there are GPUs."""
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Recompute activations in the backward pass, for about a third more time; `selective`: only those that are neither matrix
    products nor attention, which take half of the memory, for about 3 % more time. On a GPU it recomputes FlexAttention
    (`attention: auto`), too, which takes longer. Default: true on a GPU, for models of at least 1.5B parameters, and
    `selective` on a CPU, for those of at least 50M. Stored activations need about 34 bytes × hidden size × layers for each
    token (Korthikanti et al. 2022, Reducing Activation Recomputation): 12 GB for 8,192 tokens of a model of 1.5B, 28 GB of 7B.
    Also set it for rows longer than `max_tokens_per_microbatch`, each of which is a micro-batch of its own."""
    max_tokens_per_microbatch: int | None = Field(None, ge=16)
    """Token budget of a packed micro-batch. Default: 2,048 on a CPU, where more is not faster; 8,192 on a GPU, half of
    OpenRLHF 0.11's 16,192, which is for 80 GB. A stage that runs out of memory restarts with half of
    it, unless other processes hold more than half of the GPU's memory."""
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """Attention of models that train or score. `auto`: sequences of a micro-batch share the computation of common prefixes, if
    the model has plain causal attention (on CUDA by FlexAttention, if it passes a test when the model is loaded). Otherwise,
    and with `sdpa`: the attention of `transformers`, for each sequence separately, with a mask of all tokens of a line by all.
    `flash_attention_2`: the same without a mask, by the package flash-attn, on GPUs in `bf16`; for models without plain causal
    attention and long rows, or rows that share no prefixes."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of a GPU's memory for each engine. Default: 0.4, beside a trainer; 0.9, vLLM's own, for engines with GPUs of
    their own (`placement: disaggregated`)."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """Size of each CPU engine's key-value cache, in MiB. It must hold the longest sampled sequence; it also limits the
    context of a served judge. Default: room for `max_num_seqs` sequences of a stage's greatest length, up to 1,024 MiB, and
    1,024 for a server; if an eighth of the memory, divided by the engines, is less, up to that, at least 256. With a smaller
    one, completions wait for each other, and prompts that they share are read again."""
    max_num_seqs: int | None = unkeyed(None, ge=1)
    """Maximum number of completions that an engine samples at a time; the others wait. More use a large GPU better while the
    key-value cache has room for them; fewer need less memory for activations and logits. Default: as in vLLM
    0.32, 1,024 on GPUs of 70 GiB or more except the A100, and otherwise 256; while the cache has no room, completions wait."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] | None = unkeyed(None)
    """Send the adapters of `rl.training.lora`, of at most this rank, to the engines, which apply them by vLLM's LoRA
    support. This transfers less and avoids rounding of merged bf16 weights, but sampling is slower. Default: engines get
    merged weights, as always with DoRA and `modules_to_save`, which vLLM does not support."""
    weight_transfer: Literal["auto", "memory", "broadcast", "ray"] = unkeyed("auto")
    """How engines get all weights of the policy in reinforcement learning. `memory`: through shared memory of one node, the
    fastest, or the memory of a GPU that the first trainer and an engine share; `broadcast`: by a collective of torch, over any
    nodes (NCCL if trainers and engines have GPUs of their own, otherwise gloo); `ray`: as Ray objects, the slowest. `auto`:
    `memory` if all engines are on the node of the first trainer, and else `broadcast`. Adapters (`max_lora_rank`) are small and
    always go as Ray objects. The results are the same."""
    weight_update_mode: Literal["full", "delta"] = unkeyed("full")
    """What an update of the engines' weights sends in reinforcement learning. `full`: all weights. `delta`: of each tensor the
    elements whose bits have changed since the last update, or all of them where that is less; the first update is full. Engines
    end with the same weights. Of bf16 weights about one in a hundred changes in a step at a learning rate of 1e-6, so this pays
    if engines are on other nodes, over a network; within a node, finding the changes takes longer than sending all. The first
    trainer and each worker of an engine keep a copy of the policy in CPU memory, of 2 bytes per parameter. Needs
    `rl.training.bf16`, without which nearly all weights change."""
    parity_check: Literal["first", "always", "never"] = "first"
    """When to check, after a weight update of an engine, that its log-probabilities of a few tokens match those of
    `transformers`. Each check loads a second copy of the model: onto the GPU of one engine if it has room, otherwise into
    its CPU memory. `first` checks once, after the engine's first update; `always` after every update. Reinforcement
    learning needs no such check, as it compares engines and trainers in every step (`mismatch`)."""
    deepspeed: dict[str, Anything] = unkeyed({})
    """Further options of DeepSpeed, in the form of its configuration file, such as `{zero_optimization: {offload_param:
    {device: cpu}}}`. DeepSpeed checks them; they are part of the keys of stages that train. `env:NAME` stands for the
    value of an environment variable."""
    engine_options: dict[str, Anything] = unkeyed({})
    """Further arguments of `vllm.LLM` for all engines and for served judges, such as `{max_num_batched_tokens: 8192}`. vLLM
    checks them; they are part of the keys of stages that sample. `env:NAME` stands for the value of an environment variable."""
    progress_seconds: float | None = Field(None, gt=0)
    """Seconds between saves of a training stage's progress. Default: 20 times what the last save took, so that saving takes
    less than 5 % of the time; at least 60, because shorter intervals save little work. (TRL 1.16 and OpenRLHF 0.11 save every
    so many steps, however long that takes.)"""
    progress: Literal["local", "store"] = "local"
    """Location of in-stage checkpoints: only this machine, or also the store (whole weights in safetensors). From the
    store, a run resumes on another machine, with any number of trainers and any ZeRO stage."""
    no_progress_timeout_seconds: float | None = unkeyed(None, gt=0)
    """A stage without progress for this many seconds is ended and retried (`stage_retries`), however long it has run before.
    Progress is a step, shard, block, row or reward that is done, an answer of an actor or engine, a file that is downloaded or
    copied, and each start. Waits for a machine do not count. Default: twice `wait_timeout_seconds`, so that a call that hangs
    ends by its own deadline, which names it."""
    stage_timeout_seconds: float | None = Field(None, gt=0)
    """Deadline of a whole stage, without waits for a machine. Default: none, because a long training is no failure."""
    wait_timeout_seconds: float = Field(7200.0, gt=0)
    """Deadline of a single wait for an actor, an engine or a collective. One call of an actor may load a model, sample all
    completions of a step or make all optimiser steps of it. Default: 2 hours, for large batches on one GPU; the death of an
    actor is noticed at once."""
    stop_seconds: float = Field(20.0, ge=0)
    """Least number of seconds that stages have to save their progress when the run is stopped. If saving takes long, they have
    three times what it took last. 0 ends them at once."""
    reward_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of a call of a verifier, reward function or endpoint."""
    reward_load_timeout_seconds: float = unkeyed(600.0, gt=0)
    """Deadline of loading a verifier, reward function or environment, which may read or download a model."""
    actor_restarts: int = Field(3, ge=0)
    """Maximum restarts of a stage from its last checkpoint, in the same run host, after an actor or engine died."""
    stage_retries: int = Field(2, ge=0)
    """Maximum retries of a stage in a new run host, after the host died or a deadline passed."""

    def of_model(self, role: Literal["critic", "reference", "reward"], number: int = 0) -> ResourcesConfig:
        """The resources of a model beside the policy, with its own ZeRO stage and offloading; of reward models, of the one with
        this number."""
        place: ModelPlacement = self.models.of_reward(number) if role == "reward" else getattr(self.models, role)
        stage = place.zero_stage if place.zero_stage is not None else None if role == "reward" else self.zero_stage
        update: dict[str, Any] = {"zero_stage": stage}
        if isinstance(place, CriticPlacement) and place.offload_optimizer is not None:
            update["offload_optimizer"] = place.offload_optimizer
        if isinstance(place, FrozenPlacement) and place.offload_parameters:
            offloaded = {"device": "cpu", **({} if self.pin_memory else {"pin_memory": False})}
            zero = {**self.deepspeed.get("zero_optimization", {}), "offload_param": offloaded}
            update["deepspeed"] = {**self.deepspeed, "zero_optimization": zero}
        if role == "reward":
            update |= dict.fromkeys(GROUPS_OF_RANKS, 1)  # its actors score different rows, and keep no activations
        return self.model_copy(update=update)

    @property
    def engine_memory(self) -> float:
        """Fraction of a GPU's memory for each engine."""
        beside_a_trainer, alone = ENGINE_MEMORY
        return self.gpu_memory_utilization or (alone if self.placement == "disaggregated" else beside_a_trainer)

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch: those of a CPU, until :meth:`on` has set those of another device."""
        return self.max_tokens_per_microbatch or MICROBATCH_TOKENS["cpu"]

    def on(self, device: Literal["cpu", "cuda"]) -> ResourcesConfig:
        """With the token budget of this device, if the recipe sets none."""
        return self.model_copy(
            update={"max_tokens_per_microbatch": self.max_tokens_per_microbatch or MICROBATCH_TOKENS[device]}
        )

    @property
    def passed(self) -> dict[str, dict[str, Any]]:
        """Options that are passed through, by package."""
        options = {"deepspeed": self.deepspeed, "vllm": self.engine_options}
        return {package: given for package, given in options.items() if given}

    @model_validator(mode="after")
    def _fits_together(self) -> ResourcesConfig:
        for field, reserved in (("deepspeed", OURS_OF_DEEPSPEED), ("engine_options", OURS_OF_VLLM)):
            options: dict[str, Any] = getattr(self, field)
            inner = {f"{name}.{part}" for name, value in options.items() if isinstance(value, dict) for part in value}
            if taken := sorted({*options, *inner} & {*reserved}):
                raise ValueError(
                    f"`{field}.{taken[0]}` is set by other fields of the recipe, or must not be changed: remove it"
                )
        if (form := self.engine_options.get("load_format")) in ("pt", "npcache"):
            raise ValueError(f"`engine_options.load_format: {form}` reads pickles, which can run code: remove it")
        if self.attention == "flash_attention_2" and self.device == "cpu":
            raise ValueError("`attention: flash_attention_2` computes on GPUs alone: leave it out with `device: cpu`")
        if self.offload_while_sampling and self.placement == "disaggregated":
            raise ValueError(
                "`offload_while_sampling` needs `placement: colocated`: trainers with GPUs of their own keep their memory"
            )
        for field in GROUPS_OF_RANKS:
            self._check_groups(field)
        if self.sequence_parallel_size > 1 and self.attention != "auto":
            raise ValueError(
                "`sequence_parallel_size` needs `attention: auto`: the attention of `transformers` does not extend over ranks"
            )
        if self.trainer_tensor_parallel_size > 1:
            self._check_tensor_groups()
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "`offload_optimizer` needs `zero_stage` 1, 2 or 3, even with one trainer: leave `zero_stage` out for 2"
            )
        return self

    def _check_groups(self, field: str) -> None:
        """Raise ValueError if ranks do not form groups of the size in this field."""
        size = getattr(self, field)
        numbers = {
            "trainers": self.trainers,
            "models.critic.gpus": self.models.critic.gpus,
            "models.reference.gpus": self.models.reference.gpus,
        }
        for place, ranks in numbers.items():
            if ranks is not None and ranks % size:
                raise ValueError(
                    f"`{place}: {ranks}` is no multiple of `{field}: {size}`, which is how many ranks compute each micro-batch "
                    "together: change one of them"
                )

    def _check_tensor_groups(self) -> None:
        """Raise ValueError for what does not go with layers that ranks share."""
        if self.sequence_parallel_size > 1:
            raise ValueError(
                "`trainer_tensor_parallel_size` and `sequence_parallel_size` are not combined: set one of them to 1"
            )
        stages = {
            "zero_stage": self.zero_stage,
            **{f"models.{role}.zero_stage": getattr(self.models, role).zero_stage for role in ("critic", "reference")},
        }
        for field, stage in stages.items():
            if stage == 3:
                raise ValueError(
                    f"`{field}: 3` divides the parameters that `trainer_tensor_parallel_size` divides already: set it to 2 or "
                    "less, or `trainer_tensor_parallel_size` to 1"
                )
