"""What becomes of the flags of `trl grpo` and `trl rloo`."""

from __future__ import annotations

from alignment_core.migrate.rules import (
    Choice,
    Command,
    Rule,
    To,
    above_zero,
    always,
    everywhere,
    if_on,
    nothing,
    number,
    of_section,
    positive,
    unmodified,
    whole,
)
from alignment_core.migrate.trl.training import DATA, DEFAULTS, MODEL, NOT_NEEDED, TRAINING
from alignment_core.migrate.trl.values import (
    clip,
    clip_high,
    mismatch,
    prompts_per_step,
    refreshed,
    reward_functions,
    reward_model,
    rl_steps,
    with_engines,
    with_kl,
)

RL_DATA: dict[str, Rule] = {
    **DATA,
    **everywhere(
        "eval_strategy dataset_test_split eval_steps metric_for_best_model load_best_model_at_end",
        "`evaluation`, with its own prompts, measures the policy at its end, `rl.best` while it trains.",
    ),
    "max_length": "`max_prompt_length` of `rl.prompts` and `rl.generation.max_completion_length` are the limits.",
    "max_prompt_length": To(("rl.prompts.max_prompt_length", "rl.prompts.max_length"), positive),
}

RL: dict[str, Rule] = {
    "num_generations": To(("rl.generation.num_generations",), whole),
    **everywhere(
        "generation_batch_size steps_per_generation",
        To(("rl.prompts_per_step",), prompts_per_step, "completions that are sampled at once ÷ num_generations"),
    ),
    "max_completion_length": To(("rl.generation.max_completion_length",), whole),
    "temperature": To(("rl.generation.temperature",), number),
    "top_p": unmodified(1.0, "rl.generation.top_p"),
    "top_k": unmodified(0, "rl.generation.top_k"),
    "min_p": unmodified(0.0, "rl.generation.min_p"),
    "repetition_penalty": "the policy itself has to be sampled; a penalty of repetitions does not exist here.",
    "generation_kwargs": "the policy itself has to be sampled; `rl.generation` has what may be set.",
    "num_iterations": To(("rl.training.num_train_epochs",), whole, "passes over the completions of a step"),
    "max_steps": To(("rl.steps",), rl_steps, "steps of sampling"),
    "num_train_epochs": To(("rl.steps",), rl_steps, "from the number of prompts"),
    "beta": To(("rl.kl.coefficient",), number),
    "epsilon": To(("rl.loss.clip_low", "rl.loss.clip_high"), clip),
    "epsilon_high": To(("rl.loss.clip_high",), clip_high),
    "reward_model_name_or_path": To(("rl.rewards",), reward_model),
    "reward_funcs": To(("rl.rewards",), reward_functions),
    "reward_weights": To(("rl.rewards",), nothing, "`weight` of each reward"),
    "sync_ref_model": To(("rl.kl",), always({}), "`refresh_every`, from --ref_model_sync_steps"),
    "ref_model_sync_steps": To(("rl.kl.refresh_every",), refreshed),
    "ref_model_mixup_alpha": "a mixture of policy and reference does not exist here; `rl.kl.refresh_every` takes the policy.",
    "mask_truncated_completions": "the nearest is `rl.shaping.truncation_penalty`; what was cut off is trained on.",
    "use_vllm": To(("rl.generation",), always({}), "engines of vLLM always sample"),
    "vllm_mode": Choice(
        {"colocate": {"resources.placement": "colocated"}, "server": {"resources.placement": "disaggregated"}}
    ),
    "vllm_tensor_parallel_size": To(("resources.tensor_parallel_size",), whole),
    "vllm_gpu_memory_utilization": To(("resources.gpu_memory_utilization",), number),
    **everywhere(
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_enable_sleep_mode "
        "vllm_model_impl vllm_max_model_length ds3_gather_for_generation cache_implementation "
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        "not needed: engines start with the run and take new weights by themselves; `resources.engine_options` has further "
        "arguments of vLLM.",
    ),
    **everywhere("vllm_structured_outputs_regex chat_template_kwargs", "does not exist here."),
    "max_tool_calling_iterations": "`rl.environment`, with `Tools`, has `max_turns` (docs/recipes/environments.md).",
}

OF_GRPO: dict[str, Rule] = {
    "loss_type": Choice(
        {
            "grpo": {"rl.loss.aggregation": "sequence-mean-token-mean"},
            "dapo": {"rl.loss.aggregation": "token-mean"},
            "bnpo": {"rl.loss.aggregation": "token-mean"},
            "dr_grpo": {"rl.loss.aggregation": "fixed-length"},
            "cispo": {"rl.loss.loss_type": "cispo"},
            "sapo": {"rl.loss.loss_type": "sapo", "rl.loss.aggregation": "sequence-mean-token-mean"},
            "vespo": "VESPO does not exist here; `cispo` and `sapo` weight tokens softly, too.",
            "luspo": "LUSPO does not exist here; `gspo` has the ratio of the sequence, too.",
        }
    ),
    "importance_sampling_level": Choice({"token": {}, "sequence": {"rl.loss.loss_type": "gspo"}}),
    "scale_rewards": Choice(
        {
            **{word: {"rl.advantage.divide_by_deviation": True} for word in ("group", "true")},
            **{word: {"rl.advantage.divide_by_deviation": False} for word in ("none", "false")},
            "batch": "the deviation of the batch: the nearest is `rl.advantage.whiten: mean-and-deviation`.",
        },
        "TRL divides with every loss unless told otherwise, Dr. GRPO's paper does not",
    ),
    "delta": To(("rl.loss.dual_clip",), above_zero),
    "entropy_coef": To(("rl.loss.entropy_bonus",), number),
    "vllm_importance_sampling_correction": To(
        ("rl.mismatch",), with_engines(always({})), "`correction`, `level` and bounds below"
    ),
    "vllm_importance_sampling_mode": To(("rl.mismatch.correction", "rl.mismatch.level"), with_engines(mismatch)),
    **everywhere(
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        To(("rl.mismatch.high",), with_engines(number)),
    ),
    "vllm_importance_sampling_clip_min": To(("rl.mismatch.low",), with_engines(above_zero)),
    **everywhere(
        "sapo_temperature_pos sapo_temperature_neg",
        To(
            ("rl.loss.sapo_temperatures",),
            lambda words, job: [job.number("sapo_temperature_pos", 1.0), job.number("sapo_temperature_neg", 1.05)],
        ),
    ),
    "use_bias_correction_kl": To(("rl.kl.unbiased_gradient",), with_kl),
    **everywhere(
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg top_entropy_quantile use_adaptive_entropy entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold multi_objective_aggregation",
        "does not exist here.",
    ),
}

OF_RLOO: dict[str, Rule] = {
    "normalize_advantages": To(("rl.advantage.whiten",), if_on("mean-and-deviation", "none")),
    "reward_clip_range": To(("rl.rewards.clip",), lambda words, job: [float(one) for one in words]),
}

RL_DEFAULTS = {
    **{key: value for key, value in DEFAULTS.items() if key not in ("max_length",)},
    "learning_rate": "1e-6",
    "max_completion_length": "512",
    "steps_per_generation": "",
}

GRPO = Command(
    "rl",
    {**MODEL, **RL_DATA, **TRAINING, **NOT_NEEDED, **RL, **OF_GRPO},
    of_section("rl", "prompts"),
    {
        **RL_DEFAULTS,
        "num_generations": "8",
        "scale_rewards": "group",
        "loss_type": "dapo",
        "use_bias_correction_kl": "true",
        "vllm_importance_sampling_correction": "true",
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": "3.0",
    },
    {"rl.advantage.estimator": "group"},
)
RLOO = Command(
    "rl",
    {**MODEL, **RL_DATA, **TRAINING, **NOT_NEEDED, **RL, **OF_RLOO},
    of_section("rl", "prompts"),
    {**RL_DEFAULTS, "num_generations": "2", "beta": "0.05"},
    {
        "rl.advantage.estimator": "leave-one-out",
        "rl.loss.aggregation": "fixed-length",
        "rl.kl.place": "reward",
        "rl.kl.estimator": "k1",
    },
)
