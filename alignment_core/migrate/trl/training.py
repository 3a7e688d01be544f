"""What trainers of TRL have in common: tables of flags."""

from __future__ import annotations

from alignment_core.migrate.rules import (
    Choice,
    Rule,
    To,
    as_text,
    everywhere,
    model,
    name,
    nothing,
    number,
    positive,
    refused,
    switch,
    whole,
)
from alignment_core.migrate.trl.values import (
    adapters,
    batch,
    evaluates,
    held_out,
    measured_every,
    mixture,
    most_steps,
    several,
    sources,
    template,
    warm_up,
    with_lora,
)

MODEL: dict[str, Rule] = {
    "model_name_or_path": To(("model.name",), model),
    "model_revision": To(("model.revision",), as_text),
    "trust_remote_code": To(("model.trust_remote_code",), switch),
    "use_peft": To(("{training}.lora",), adapters),
    "lora_r": To(("{training}.lora.r",), with_lora(whole)),
    "lora_alpha": To(("{training}.lora.lora_alpha",), with_lora(whole)),
    "lora_dropout": To(("{training}.lora.lora_dropout",), with_lora(number)),
    "lora_target_modules": To(("{training}.lora.target_modules",), with_lora(several)),
    "lora_modules_to_save": To(("{training}.lora.modules_to_save",), with_lora(lambda words, job: list(words))),
    "use_rslora": To(("{training}.lora.use_rslora",), with_lora(switch)),
    "use_dora": To(("{training}.lora.use_dora",), with_lora(switch)),
    "load_in_4bit": To(("{training}.lora.load_in_4bit",), with_lora(switch)),
    "load_in_8bit": "does not exist here; `lora.load_in_4bit` (QLoRA) does.",
    **everywhere(
        "lora_target_parameters lora_task_type", "not needed: it follows from the method and from `target_modules`."
    ),
    **everywhere(
        "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        "4 bits are NF4 with double quantisation here, as in QLoRA.",
    ),
    **everywhere("dtype torch_dtype", "weights are trained in fp32, or with `bf16` in bfloat16 beside fp32 ones."),
    "attn_implementation": "chosen by itself; `resources.attention: sdpa` switches the shared prefixes off.",
    "model_init_kwargs": "does not exist here; `model` has the fields that there are.",
}

TRAINING: dict[str, Rule] = {
    **everywhere(
        "per_device_train_batch_size gradient_accumulation_steps",
        To(("{training}.batch_size",), batch, "per device × accumulation × devices"),
    ),
    "num_train_epochs": To(("{training}.num_train_epochs",), whole),
    "max_steps": To(("{training}.max_steps",), most_steps),
    "learning_rate": To(("{training}.learning_rate",)),
    "lr_scheduler_type": Choice(
        {
            "linear": {"{training}.lr_scheduler_type": "linear"},
            "cosine": {"{training}.lr_scheduler_type": "cosine"},
            "cosine_with_min_lr": {"{training}.lr_scheduler_type": "cosine"},
            "constant": {"{training}.lr_scheduler_type": "constant"},
            "constant_with_warmup": {"{training}.lr_scheduler_type": "constant"},
            "warmup_stable_decay": {"{training}.lr_scheduler_type": "wsd"},
        }
    ),
    "lr_scheduler_kwargs": "`min_lr_ratio`, `decay_ratio` and `decay_type` of the training section are what there is.",
    "warmup_ratio": To(("{training}.warmup_ratio",), warm_up),
    "warmup_steps": To(("{training}.warmup_ratio",), warm_up, "as a share of all steps"),
    "optim": Choice(
        {
            **{
                word: {"{training}.optimizer": "adamw"}
                for word in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
            },
            "adafactor": {"{training}.optimizer": "adafactor"},
        }
    ),
    "weight_decay": To(("{training}.weight_decay",)),
    "adam_beta1": To(("{training}.adam_beta1",)),
    "adam_beta2": To(("{training}.adam_beta2",)),
    "adam_epsilon": To(("{training}.adam_epsilon",)),
    "max_grad_norm": To(("{training}.max_grad_norm",)),
    "router_aux_loss_coef": To(("{training}.router_aux_loss_coef",), number),
    "bf16": To(("{training}.bf16",), switch),
    "fp16": "does not exist here; `bf16` is the half precision.",
    "seed": To(("seed",), whole),
    "num_processes": To(("resources.trainers",), whole),
    "accelerate_config": Choice(
        {
            **{f"zero{stage}": {"resources.zero_stage": stage, "resources.trainers": 8} for stage in (1, 2, 3)},
            "single_gpu": {"resources.trainers": 1},
            "multi_gpu": {"resources.trainers": 8},
        }
    ),
    "gradient_checkpointing": To(("resources.gradient_checkpointing",), switch),
    "run_name": To(("name",), name),
    "report_to": To(
        ("tracking.wandb", "tracking.tensorboard"),
        lambda words, job: (
            {"project": "trl"} if {"wandb", "all"} & {*words} else None,
            {"tensorboard", "all"} & {*words} != set() or None,
        ),
        "W&B and TensorBoard; others do not exist here",
    ),
    "project": To(
        ("tracking.wandb.project",),
        lambda words, job: (
            as_text(words, job) if "wandb" in job.words("report_to") else refused("it belongs to --report_to wandb.")
        ),
    ),
}


MEASURED: dict[str, Rule] = {
    "eval_strategy": To(("{data}.sources",), held_out),
    "dataset_test_split": To(("{data}.sources",), evaluates(nothing), "`split` of the source that is held out"),
    "eval_steps": To(("{training}.eval_steps",), evaluates(measured_every)),
    "metric_for_best_model": To(
        ("{training}.metric_for_best_model",), evaluates(lambda words, job: as_text(words, job).removeprefix("eval_"))
    ),
    "load_best_model_at_end": "`metric_for_best_model`, with `eval_steps`, is all that it needs here.",
}

NOT_NEEDED: dict[str, Rule] = {
    **everywhere(
        "output_dir save_only_model save_on_each_node",
        "not needed: whole models, as transformers loads them, are in the store; `align artifacts ls` lists them and "
        "`align artifacts show` says where their files are.",
    ),
    **everywhere(
        "save_strategy save_steps save_total_limit enable_jit_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint auto_find_batch_size overwrite_output_dir",
        "not needed: progress is saved every `resources.progress_seconds` and deleted when the stage is done; a "
        "micro-batch that does not fit is halved.",
    ),
    "resume_from_checkpoint": "not needed: the same `align run` again, or `align resume last`, continues where a run ended.",
    **everywhere(
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter logging_dir log_level "
        "log_level_replica disable_tqdm include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics "
        "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo debug",
        "not needed: every step is reported, and completions are kept as trajectories (`align samples`).",
    ),
    **everywhere(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "`promotion.publish: hf://organisation/name` publishes what passes its gates, `align artifacts publish` anything.",
    ),
    **everywhere(
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        "trackio does not exist here; `tracking` has W&B and TensorBoard.",
    ),
    **everywhere(
        "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "batch_eval_metrics prediction_loss_only bf16_full_eval fp16_full_eval include_for_metrics eval_packing eval_delay "
        "eval_on_start greater_is_better do_train do_eval do_predict num_generations_eval",
        "not needed: how held-out rows are measured follows from the method.",
    ),
    **everywhere(
        "packing packing_strategy padding_free pad_to_multiple_of pad_token eos_token train_sampling_strategy group_by_length "
        "length_column_name torch_empty_cache_steps remove_unused_columns average_tokens_across_devices",
        "not needed: rows are always packed, each seeing only itself, and losses are means over the whole batch.",
    ),
    **everywhere(
        "dataset_num_proc dataset_kwargs dataset_streaming streaming dataloader_drop_last dataloader_num_workers "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order precompute_ref_log_probs precompute_ref_batch_size label_names accelerator_config",
        "not needed: rows are tokenised, and references asked, by stages of their own, once and cached.",
    ),
    **everywhere(
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config tf32 use_cache "
        "activation_offloading gradient_checkpointing_kwargs optim_args optim_target_modules cast_lm_head_to_fp32 "
        "parallelism_config",
        "does not exist here; how a layer is computed is left to transformers and DeepSpeed.",
    ),
    **everywhere(
        "fsdp fsdp_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "ddp_timeout local_rank ignore_bias_buffers config_file num_machines main_process_port "
        "mixed_precision use_cpu",
        "where to run is `resources`: by default every GPU of the machine, with DeepSpeed's ZeRO (`resources.zero_stage`).",
    ),
    "deepspeed": "`resources.zero_stage` and `offload_optimizer`; what else that file has goes into `resources.deepspeed`.",
    "disable_dropout": "not needed: models are trained without dropout, but for `lora.lora_dropout`.",
    "full_determinism": "not needed: a recipe's seed decides everything, and killed runs resume to the same bytes.",
    "data_seed": "one `seed` decides everything.",
    "shuffle_dataset": "`shuffle` of the data, which is on by default.",
    **everywhere("label_smoothing_factor neftune_noise_alpha", "does not exist here."),
}

DATA: dict[str, Rule] = {
    "dataset_name": To(("{data}.sources",), sources),
    "datasets": To(("{data}.sources",), mixture),
    "dataset_config": To(("{data}.sources.subset",), as_text),
    "dataset_train_split": To(("{data}.sources.split",), as_text),
    "test_split_size": "`test_rows` of the data holds out a number of rows.",
    **MEASURED,
    "max_length": To(("{data}.max_length",), positive),
    "truncation_mode": "prompts are cut at their beginning and answers at their end (`overlong: truncate`).",
    "chat_template_path": To(
        ("model.chat_template",),
        template,
        "the text of the file",
    ),
}


COMMON: dict[str, Rule] = {**DATA, **TRAINING, **NOT_NEEDED}
TRUNCATES = {"{data}.overlong": "truncate"}
DEFAULTS = {
    "per_device_train_batch_size": "8",
    "num_train_epochs": "3",
    "lr_scheduler_type": "linear",
    "max_length": "1024",
    "bf16": "true",
    "lora_dropout": "0.05",
}
