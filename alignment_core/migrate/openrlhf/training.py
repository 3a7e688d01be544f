"""What trainers of OpenRLHF have in common: tables of flags."""

from __future__ import annotations

from alignment_core.migrate.openrlhf.values import (
    as_written,
    demonstrations,
    held_out,
    learning_rate_floor,
    measured_every,
    mixing,
    precision,
    sources,
    template,
    template_of_pairs,
    warm_up,
)
from alignment_core.migrate.rules import (
    Choice,
    Rule,
    To,
    always,
    as_is,
    as_text,
    column,
    everywhere,
    folder,
    if_on,
    model,
    name,
    nothing,
    only_if,
    pair,
    positive,
    switch,
    whole,
)

MODEL: dict[str, Rule] = {"pretrain": To(("model",), model)}

TRAINING: dict[str, Rule] = {
    "max_epochs": To(("{training}.num_train_epochs",), whole),
    "train_batch_size": To(("{training}.batch_size",), whole, "in total, in both"),
    "learning_rate": To(("{training}.learning_rate",)),
    "actor_learning_rate": To(("{training}.learning_rate",)),
    "optim": Choice({"adam": {"{training}.optimizer": "adamw"}, "muon": {"{training}.optimizer": "muon"}}),
    "lr_scheduler": Choice(
        {
            "cosine_with_min_lr": {"{training}.lr_scheduler_type": "cosine"},
            "cosine": {"{training}.lr_scheduler_type": "cosine"},
            "linear": {"{training}.lr_scheduler_type": "linear"},
            "constant": {"{training}.lr_scheduler_type": "constant"},
            "constant_with_warmup": {"{training}.lr_scheduler_type": "constant"},
            "warmup_stable_decay": {"{training}.lr_scheduler_type": "wsd"},
        }
    ),
    "min_lr_ratio": To(("{training}.min_lr_ratio",), learning_rate_floor),
    "lr_warmup_ratio": To(("{training}.warmup_ratio",), warm_up),
    "l2": To(("{training}.weight_decay",)),
    "adam_betas": To(("{training}.adam_beta1", "{training}.adam_beta2"), lambda words, job: tuple(pair(words, job))),
    "adam_eps": To(("{training}.adam_epsilon",)),
    "max_norm": To(("{training}.max_grad_norm",)),
    "aux_loss_coef": To(("{training}.router_aux_loss_coef",)),
    "bf16": To(("{training}.bf16",), switch),
    "param_dtype": To(("{training}.bf16",), precision),
    "lora_rank": To(("{training}.lora.r",), positive),
    "lora_alpha": To(
        ("{training}.lora.lora_alpha",), only_if("lora_rank", as_is, "without --lora_rank there is no LoRA.")
    ),
    "lora_dropout": To(
        ("{training}.lora.lora_dropout",), only_if("lora_rank", as_is, "without --lora_rank there is no LoRA.")
    ),
    "target_modules": To(
        ("{training}.lora.target_modules",),
        only_if(
            "lora_rank",
            lambda words, job: words[0] if list(words) == ["all-linear"] else list(words),
            "without --lora_rank there is no LoRA.",
        ),
    ),
    "load_in_4bit": To(
        ("{training}.lora.load_in_4bit",),
        only_if("lora_rank", switch, "4 bits are for LoRA here: set --lora_rank, too."),
    ),
    "seed": To(("seed",), whole),
}

RESOURCES: dict[str, Rule] = {
    "zero_stage": To(("resources.zero_stage",)),
    "adam_offload": To(("resources.offload_optimizer",), switch),
    "gradient_checkpointing": To(("resources.gradient_checkpointing",), switch),
    "train_max_tokens_per_gpu": To(("resources.max_tokens_per_microbatch",), whole),
}

TRACKING: dict[str, Rule] = {
    "use_wandb": To(
        ("tracking.wandb",),
        always({}),
        "the key comes from WANDB_API_KEY or `wandb login`, never from a recipe",
    ),
    "wandb_project": To(("tracking.wandb.project",), only_if("use_wandb", as_text)),
    "wandb_org": To(("tracking.wandb.entity",), only_if("use_wandb", as_text)),
    "wandb_run_name": To(("name",), name),
    "wandb_group": "runs are grouped by recipe; W&B's groups do not exist here.",
    "use_tensorboard": To(("tracking.tensorboard",), folder),
}

NOT_NEEDED: dict[str, Rule] = {
    **everywhere(
        "save_path ckpt_path save_hf_ckpt save_value_network",
        "not needed: whole models, as transformers loads them, are in the store; `align artifacts ls` lists them and "
        "`align artifacts show` says where their files are.",
    ),
    **everywhere(
        "save_steps max_ckpt_num max_ckpt_mem disable_ds_ckpt use_ds_universal_ckpt",
        "not needed: progress is saved every `resources.progress_seconds` and deleted when the stage is done.",
    ),
    "load_checkpoint": "not needed: the same `align run` again, or `align resume last`, continues where a run ended.",
    **everywhere(
        "micro_train_batch_size micro_rollout_batch_size micro_batch_size use_dynamic_batch rollout_max_tokens_per_gpu",
        "not needed: micro-batches hold `resources.max_tokens_per_microbatch` tokens, which does not change the result.",
    ),
    "packing_samples": "not needed: rows are always packed, each seeing only itself.",
    "logging_steps": "not needed: every step is reported.",
    "full_determinism": "not needed: a recipe's seed decides everything, and killed runs resume to the same bytes.",
    **everywhere(
        "local_rank perf", "not needed: it is for OpenRLHF's own launcher and timings; costs are in every run's table."
    ),
    "attn_implementation": "chosen by itself; `resources.attention: sdpa` switches the shared prefixes off.",
    **everywhere(
        "use_liger_kernel deepcompile experts_implementation",
        "does not exist here; how a layer is computed is left to transformers and DeepSpeed.",
    ),
    **everywhere(
        "grad_accum_dtype overlap_comm zpg",
        "an option of DeepSpeed: pass it in its own form with `resources.deepspeed`, where it is one that can be set.",
    ),
    **everywhere(
        "ring_attn_size ring_head_stride ring_attn_head_stride ds_tensor_parallel_size",
        "does not exist here: trainers share neither a sequence nor a matrix; nearest are `resources.zero_stage: 3` and "
        "`gradient_checkpointing`.",
    ),
    "gradient_checkpointing_use_reentrant": "not needed: checkpointing is never re-entrant here.",
    **everywhere(
        "disable_fast_tokenizer dataloader_num_workers",
        "not needed: tokenising is a stage of its own, done once and cached.",
    ),
    **everywhere(
        "ref_offload ref_reward_offload reward_offload teacher_offload",
        "not needed: a reference's or teacher's log-probabilities are computed by a stage before training, or by actors that "
        "release their memory.",
    ),
    "value_head_prefix": "not needed: the head is found in the model; trained ones are saved as sequence classifiers.",
    "compute_fp32_loss": "not needed: losses are always computed in fp32.",
    "use_ms": "models and data of ModelScope are not read; give a name on the Hub, or a local folder.",
    **everywhere(
        "muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov",
        "Muon's steps are scaled to AdamW's here, so that `learning_rate` is all it needs.",
    ),
}

SOURCES: dict[str, Rule] = {
    "dataset": To(("{data}.sources",), sources),
    "dataset_split": To(("{data}.sources.split",), as_text),
    "train_split": To(("{data}.sources.split",), as_text),
    "max_samples": To(("{data}.sources.rows",), whole, "of each source"),
    "dataset_probs": To(("{data}.mixing",), mixing, "and `weight` of each source"),
    "eval_dataset": To(("{data}.sources",), held_out),
    "eval_split": To(
        ("{data}.sources",),
        only_if("eval_dataset", nothing),
        "`split` of the source that is held out",
    ),
    "eval_steps": To(("{training}.eval_steps",), measured_every),
    "max_len": To(("{data}.max_length",), whole),
    "apply_chat_template": To(("{data}.chat_template",), as_written, "the default, where there is a template"),
    "tokenizer_chat_template": To(("{data}.chat_template",), as_text),
}

TRUNCATES = {"{data}.overlong": "truncate"}

DEMONSTRATIONS: dict[str, Rule] = {
    **SOURCES,
    "input_key": To(("{data}.sources.columns",), demonstrations),
    "output_key": To(("{data}.sources.columns",), column("completion")),
    "input_template": To(("{data}.prompt_template",), template),
    "multiturn": To(("{data}.assistant_turns",), if_on("all", "last")),
}

PAIRS: dict[str, Rule] = {
    **SOURCES,
    "prompt_key": To(("{data}.sources.columns",), column("prompt")),
    "chosen_key": To(("{data}.sources.columns",), column("chosen")),
    "rejected_key": To(("{data}.sources.columns",), column("rejected")),
    "input_template": To(("{data}.prompt_template",), template_of_pairs),
}

COMMON: dict[str, Rule] = {**TRAINING, **RESOURCES, **TRACKING, **NOT_NEEDED}

SCHEDULE = {
    "lr_scheduler": "cosine_with_min_lr",
    "min_lr_ratio": "0.1",
    "lr_warmup_ratio": "0.03",
    "adam_betas": "0.9 0.95",
}
DEFAULTS = {**SCHEDULE, "train_batch_size": "128", "lora_alpha": "16", "wandb_project": "openrlhf"}
AS_WRITTEN = {"apply_chat_template": "false"}
USER = {**AS_WRITTEN, "input_template": ("User: {}\nAssistant: ",)}
