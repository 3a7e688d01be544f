"""Training: the sections that methods share, and those of SFT, DPO and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer, ValidationInfo, model_validator

from alignment_core.recipes.base import Config, unkeyed
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.preference import DpoLossConfig, with_learning_rate

Epochs = Annotated[float, PlainSerializer(lambda epochs: int(epochs) if epochs == int(epochs) else epochs)]
"""A number of epochs. Whole ones are integers in dumps, and so in keys."""
ROUTER_LOSS = "router_aux_loss_coef"
EVALUATION_FIELDS = ("eval_steps", "eval_on_start", "metric_for_best_model", "early_stopping_patience")
"""Fields of :class:`TrainingConfig` that need held-out rows."""
WHOLE_MATRICES = ("muon", "adafactor")
"""Optimisers that need whole matrices in fp32."""
ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
"""Fields that Adafactor does not have."""


class LoraConfig(Config):
    """Low-rank adaptation: small matrices are trained beside the model's linear layers, whose weights stay frozen."""

    RENAMED: ClassVar = {"lora_target_parameters": "target_parameters"}

    r: int = Field(16, ge=1)
    """Rank of the matrices."""
    lora_alpha: int = Field(32, ge=1)
    """Scaling: the product of the matrices is multiplied by `lora_alpha` / `r`."""
    use_rslora: bool = unkeyed(False)
    """Scale by `lora_alpha` / √`r` instead (rsLoRA), so that high ranks learn as fast as low ones."""
    use_dora: bool = unkeyed(False)
    """Train magnitude and direction of the weights separately (DoRA)."""
    load_in_4bit: bool = unkeyed(False)
    """Load the frozen linear layers in 4 bits, an eighth of fp32's memory (QLoRA: NF4 with double quantisation, by
    `bitsandbytes`, the extra `qlora`). In saved models the adapters are merged into the dequantised layers."""
    load_in_8bit: bool = unkeyed(False)
    """Load them in 8 bits instead, a quarter of fp32's memory and with less rounding: int8 with a scale for each row, as
    `bitsandbytes` stores LLM.int8() (the extra `qlora`). Only weights are rounded, inputs are not, so that engines and saved
    models compute what is trained. Not part of the stage's key while false."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Modules that get adapters: every linear layer except the head, or those with these names, such as `q_proj`. `[]`: only
    `target_parameters` get adapters."""
    target_parameters: tuple[str, ...] = unkeyed(())
    """Parameters outside of linear layers that also get adapters, by the end of their names: above all the fused experts of a
    mixture, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`. Each expert has matrices of its own, of rank `r`. Engines
    receive such adapters merged into the weights. As in `peft`, `lora_dropout` and `use_dora` are not supported with them. Not
    part of the stage's key while unset."""
    modules_to_save: tuple[str, ...] = unkeyed(())
    """Modules that are fully trained beside the adapters, by name, such as `embed_tokens` and `lm_head` (with tied embeddings
    either name means both). They are saved with the adapters, as in `peft`."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability for the adapters' inputs. The dropout masks depend on the number of trainers and on
    `max_tokens_per_microbatch`."""

    @model_validator(mode="after")
    def _has_one_precision(self) -> LoraConfig:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("weights are loaded either in 4 or in 8 bits: leave out `load_in_4bit` or `load_in_8bit`")
        return self

    @model_validator(mode="after")
    def _has_targets(self) -> LoraConfig:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "`target_modules` and `target_parameters` are empty, so nothing has an adapter: name modules, or leave "
                "`target_modules` out for all linear layers"
            )
        if self.target_parameters and self.lora_dropout:
            raise ValueError(
                f"`lora_dropout` {self.lora_dropout} drops inputs of linear layers, and the adapters of `target_parameters` "
                "are added to weights: set it to 0, or leave `target_parameters` out"
            )
        if self.target_parameters and self.use_dora:
            raise ValueError(
                "`use_dora` scales the rows of linear layers, and `target_parameters` are none: remove one of them"
            )
        return self

    @property
    def base_bits(self) -> Literal[4, 8] | None:
        """Bits of a weight of the frozen linear layers; None: those of the training's precision."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @property
    def is_addable(self) -> bool:
        """Whether engines can add the adapter: a layer's output is that of its weights plus that of its adapter."""
        return not self.use_dora and not self.modules_to_save and not self.target_parameters


class TrainingConfig(Config):
    """The optimiser and its schedule; nothing here depends on the number of devices."""

    FILLED_BY_PLACE: ClassVar = True
    ALTERNATIVES: ClassVar = {"warmup_steps": "warmup_ratio"}

    num_train_epochs: Epochs = Field(1, gt=0)
    """Passes over the training rows. With a fraction the last pass ends early: 1.5 epochs of 101 steps are 152 steps."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum number of optimiser steps; training stops there even within an epoch."""
    batch_size: int = Field(32, ge=1)
    """Rows (or pairs) per optimiser step, in total over all devices and accumulation steps."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon", "adafactor"] = unkeyed("adamw")
    """`adamw`; `adamw_8bit`, with moments in 8 bits (2 bytes per parameter instead of 8) except those of embeddings, by
    `bitsandbytes` (the extra `qlora`); `paged_adamw_8bit`, whose moments move to CPU memory when a GPU's is full; `muon`,
    with orthogonalised updates of hidden matrices (AdamW for embeddings, heads and vectors);
    `adafactor`, with row and column sums instead of moments. The last two have AdamW's learning rates, and need whole
    matrices: fp32, and `resources.zero_stage: 0` with several trainers. Not part of the stage's key while `adamw`."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Schedule of the learning rate after the warm-up. `wsd` (warm-up, stable, decay) is constant at first and decays over the
    last `decay_ratio` of the steps."""
    decay_ratio: float = unkeyed(0.1, gt=0, le=1)
    """Fraction of the steps over which the learning rate decays at the end; only with `wsd`. Not part of the stage's key
    while 0.1."""
    decay_type: Literal["linear", "1-sqrt"] = unkeyed("linear")
    """Shape of the decay to the final learning rate: linear, or 1 − √(fraction of the decay); only with `wsd`. Not part of the
    stage's key while `linear`."""
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of the steps, rounded up to whole ones, over which the learning rate rises linearly from zero, while AdamW's
    averages of the gradients are still those of a few batches. 0.03 as in all trainers of OpenRLHF 0.11 and SFT of Tülu 3
    (Lambert et al. 2024); DPO and its relatives have 0.1, as in the recipes of Zephyr and Tülu 3."""
    warmup_steps: int = unkeyed(0, ge=0)
    """Number of these steps, instead of `warmup_ratio`. Not part of the stage's key while 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate, as a fraction of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to every trained parameter except norms, biases and embeddings. A language
    model head that is tied to the input embeddings counts as an embedding; an untied head is decayed like any other linear
    layer, and so are LoRA adapters and the head of a reward model or critic. (The `Trainer` of `transformers` decays
    embeddings, too.)"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's β₁."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's β₂."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's ε."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum norm of the gradient, for clipping."""
    eval_steps: int | None = unkeyed(None, ge=1)
    """Number of steps between evaluations on held-out rows (`test_rows` of the data, or sources with `held_out`); the last step
    is always evaluated. Default: only the last step. Not part of the stage's key while unset, nor are the next two fields."""
    metric_for_best_model: str | None = unkeyed(None)
    """Metric on held-out rows, such as `loss` or `accuracy`, that selects the resulting checkpoint: lowest is best for `loss`,
    `nll` and `kl`, highest for `accuracy` and `margin`. If the last checkpoint is not the best, it is the output `last`.
    Default: the last checkpoint."""
    early_stopping_patience: int | None = unkeyed(None, ge=1)
    """Stop after this many consecutive evaluations without improvement."""
    eval_on_start: bool = unkeyed(True)
    """Evaluate held-out rows before the first step, too, which shows how much a training improves (TRL 1.16: off). It takes one
    pass over them and does not change the result. Not part of the stage's key while true."""
    save_steps: int | None = unkeyed(None, ge=1)
    """Number of steps (in reinforcement learning, of `rl.steps`) between models that are kept as outputs of the stage:
    `checkpoint-40` is the model after 40 steps, with adapters merged in. The last model is an output anyway. Default: no
    others, because each takes the space of a whole model and progress is saved without them (TRL 1.16: every 500 steps). Not
    part of the stage's key while unset, nor is `save_total_limit`."""
    save_total_limit: int | None = unkeyed(None, ge=1)
    """Maximum number of models that `save_steps` keeps: the newest ones. Default: all."""
    max_loss: float | None = unkeyed(None, gt=0)
    """Stop if the loss of a batch exceeds this value, as a guard against divergence. Not part of the stage's key while
    unset."""
    router_aux_loss_coef: float | None = Field(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (Mixtral, Qwen3-MoE, …); 0 disables it. The loss is not
    linear in the tokens: for a batch it is the mean over micro-batches, so `max_tokens_per_microbatch` and the
    number of trainers change it slightly. Default: `router_aux_loss_coef` of the model's configuration (0.001 for Mixtral and
    Qwen3-MoE), as in TRL 1.16; 0 for models without routers, reward models and critics."""
    lora: LoraConfig | None = unkeyed(None)
    """Train LoRA adapters (and a new head) instead of all weights. Saved models have the adapters merged in; the output
    `adapter` has the adapters alone, for `peft`. Not part of the stage's key while unset."""
    train_vision_tower: bool = unkeyed(False)
    """Of an image-text model, also train what reads images: the vision tower and the projector of its features. By default only
    the language model is trained, as in LLaMA-Factory. Not part of the stage's key while false."""
    bf16: bool = False
    """Train and save in bfloat16, with fp32 master weights and fp32 gradient accumulation; otherwise in fp32. Default: true in
    a recipe with `resources.device: cuda`, except with `muon` and `adafactor`, as in TRL and OpenRLHF 0.11; otherwise false.
    The default follows the recipe and not the machine, because the precision is part of the stage's key, which must be the same
    on every machine; `align check` warns of fp32 on a GPU. Set it also on processors with instructions for it (AVX-512 BF16,
    AMX, ARM's bf16), where pretrained models train twice as fast: `align init` does."""
    keep_master_weights: bool = unkeyed(True)
    """With `bf16`, save the fp32 master weights of a policy beside it, and continue from those of the initial policy, if it has
    any. The next round, night or stage then continues from the exact weights instead of those rounded to bfloat16, which lose
    small changes: at a learning rate of 5e-7, most changes of a few steps. Master weights need twice the disk space of the
    policy until `retention.masters_days` deletes them; nothing but training reads them. With `lora` the adapters are merged
    into the fp32 weights, and the saved policy is these rounded; adapters beside weights in 4 or 8 bits have none. Not part of
    the stage's key while true."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, content: Any) -> Any:
        """A stored section has all fields that are always in dumps. Earlier versions left the coefficient out if it was 0."""
        dumped = {name for name, field in cls.model_fields.items() if field.exclude_if is None} - {ROUTER_LOSS}
        if isinstance(content, dict) and ROUTER_LOSS not in content and dumped <= content.keys():
            return {**content, ROUTER_LOSS: 0.0}
        return content

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> TrainingConfig:
        if self.optimizer in WHOLE_MATRICES and self.bf16:
            raise ValueError(
                f"`optimizer: {self.optimizer}` works on whole matrices, and `bf16` partitions the fp32 weights: use `adamw`, "
                "or leave out `bf16`"
            )
        if self.lora is not None:
            self.refuse_unused(
                info, ("train_vision_tower",), "with `lora`, whose adapters are those of the language model"
            )
        if self.optimizer == "muon" and self.lora is not None and self.lora.target_parameters:
            raise ValueError(
                "`optimizer: muon` works on whole matrices, and an adapter of `lora.target_parameters` holds those of all "
                "experts in one: use `adamw`"
            )
        if not self.bf16:
            self.refuse_unused(info, ("keep_master_weights",), "without `bf16`")
        elif self.base_bits:
            why = f"with `lora.load_in_{self.base_bits}bit`, whose policies have no master weights"
            self.refuse_unused(info, ("keep_master_weights",), why)
        if self.optimizer == "adafactor":
            self.refuse_unused(info, ADAM, "with `optimizer: adafactor`")
        if self.metric_for_best_model is not None and self.eval_steps is None:
            raise ValueError("`metric_for_best_model` needs `eval_steps`")
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            raise ValueError("`early_stopping_patience` needs `metric_for_best_model`")
        if self.save_total_limit is not None and self.save_steps is None:
            raise ValueError("`save_total_limit` needs `save_steps`")
        self.check_save_steps(info, "max_steps", self.max_steps)
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"`warmup_steps` {self.warmup_steps} and `warmup_ratio` {self.warmup_ratio} are two lengths of one warm-up: "
                "set one of them to 0"
            )
        if self.lr_scheduler_type == "constant":
            self.refuse_unused(info, ("min_lr_ratio",), "with `lr_scheduler_type: constant`")
        if self.lr_scheduler_type != "wsd":
            self.refuse_unused(info, ("decay_ratio", "decay_type"), "without `lr_scheduler_type: wsd`")
        elif self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"`warmup_ratio` {self.warmup_ratio} and `decay_ratio` {self.decay_ratio} must not exceed 1 in sum"
            )
        return self

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """Float type in which the model computes in training, by torch's name."""
        return "bfloat16" if self.bf16 else "float32"

    @property
    def has_8bit_moments(self) -> bool:
        """Whether the optimiser is one of `bitsandbytes`, with moments in 8 bits."""
        return self.optimizer in ("adamw_8bit", "paged_adamw_8bit")

    @property
    def base_bits(self) -> Literal[4, 8] | None:
        """Bits of a weight of the frozen layers beside which adapters are trained; None: none are quantised."""
        return self.lora.base_bits if self.lora else None

    @property
    def saves_masters(self) -> bool:
        """Whether a policy's fp32 master weights are saved, and those of its start are used."""
        return self.bf16 and self.keep_master_weights and not self.base_bits

    def check_save_steps(self, info: ValidationInfo, field: str, steps: int | None) -> None:
        """Raise ValueError if `save_steps` keeps no model in so many ``steps``, which the recipe sets in ``field``."""
        if self.save_steps is not None and steps is not None and self.save_steps >= steps:
            self.refuse_unused(
                info,
                ("save_steps",),
                f"with `{field}` {steps}, because the last model is an output anyway",
                f"set it below {steps}, or leave it out",
            )

    def measured(self, data: DataConfig, *names: str) -> tuple[str, ...]:
        """Those metrics for gates that a training on ``data`` measures on held-out rows, and ``<name>.first`` of its start."""
        first = [f"{name}.first" for name in names] if self.eval_on_start else []
        return (*names, *first) if data.has_test_rows else ()

    def check_held_out(self, data: DataConfig) -> None:
        """Raise ValueError if evaluations are set and ``data`` has no held-out rows."""
        if self.eval_steps is not None and not data.has_test_rows:
            raise ValueError(
                "`training.eval_steps` measures held-out rows, and there are none: set `data.test_rows`, or add a source "
                "with `held_out: true`"
            )


class SftConfig(Config):
    """Supervised fine-tuning: next-token loss on completions."""

    data: DataConfig
    """Demonstrations."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule."""
    disable_dropout: bool = unkeyed(True)
    """Disable the dropout in the model's configuration (such as GPT-2's 0.1), as all other methods do; `lora_dropout` is not
    affected. Not part of the stage's key while true."""
    neftune_noise_alpha: float = unkeyed(0.0, ge=0)
    """Scale α of the noise that is added to the embeddings in training (NEFTune): uniform between ±α/√(tokens of the row ·
    hidden size). 5 to 15 in the paper (Jain et al. 2023). Default: no noise. Not part of the stage's key while 0."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> SftConfig:
        self.training.check_held_out(self.data)
        return self


class RewardModelConfig(Config):
    """A reward model: trained on preferences, or an existing one."""

    model: ModelConfig | None = None
    """Existing sequence-classification model, which is used without training."""
    data: DataConfig | None = None
    """Preference pairs to train on."""
    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """Bradley–Terry, or its log-exp form; both use a `margin` column if there is one."""
    center_rewards_coefficient: float = unkeyed(0.0, ge=0)
    """Coefficient of the mean of (chosen score + rejected score)², which is added to the loss so that scores are centred at 0
    (Eisenstein et al. 2023, Helping or Herding); 0.01 is advised by TRL. Not part of the stage's key while 0."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule."""

    @model_validator(mode="after")
    def _trains(self, info: ValidationInfo) -> RewardModelConfig:
        if self.model is not None:
            self.refuse_unused(
                info,
                ("loss_type", "center_rewards_coefficient", "training"),
                "because `model` names an existing reward model",
                "leave it out, or set the whole section, as in --set 'reward_model={model: NAME}'",
            )
        elif self.data is not None:
            self.training.check_held_out(self.data)
            self.training.refuse_unused(info, ("keep_master_weights",), "because nothing trains a reward model further")
        return self

    def check_origin(self) -> None:
        """Raise ValueError unless exactly one of ``data`` and ``model`` is set."""
        if (self.model is None) == (self.data is None):
            raise ValueError(
                "`reward_model` needs exactly one of `data` (train a model) and `model` (use an existing one), as in --set "
                "'reward_model={model: NAME}'"
            )


class DpoConfig(Config):
    """Direct preference optimisation on a fixed set of pairs."""

    data: DataConfig
    """Preference pairs."""
    loss: DpoLossConfig = DpoLossConfig()
    """The preference loss."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, warmup_ratio=0.1)
    """Optimiser and schedule."""

    @classmethod
    def section_defaults(cls, content: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
        """With the learning rate of the loss."""
        return with_learning_rate(super().section_defaults(content), content)

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> DpoConfig:
        self.training.check_held_out(self.data)
        self.loss.check_trained(with_lora=self.training.lora is not None)
        return self
