"""What becomes of the flags of `train_ppo_ray`."""

from __future__ import annotations

from alignment_core.migrate.openrlhf.training import AS_WRITTEN, COMMON, DEFAULTS, MODEL
from alignment_core.migrate.openrlhf.values import (
    answers_length,
    as_written,
    bounds_of_level,
    clip,
    clip_bounds,
    correction_bounds,
    correction_of_level,
    environment,
    in_both,
    mixing,
    normalised,
    number_of_steps,
    of_critic,
    older_correction,
    placement,
    prompts_length,
    remote_rewards,
    reward_models,
    sources,
    template,
    trainers,
    whitening,
    with_split,
)
from alignment_core.migrate.rules import (
    Choice,
    Command,
    Rule,
    To,
    above_zero,
    always,
    as_is,
    as_text,
    column,
    everywhere,
    if_on,
    nothing,
    number,
    only_if,
    pair,
    positive,
    switch,
    unmodified,
    whole,
)


def both(name: str) -> tuple[str, str]:
    """A field of the training and the same one of the evaluation."""
    return f"rl.{name}", f"evaluation.{name}"


KL: dict[str, Rule] = {
    "init_kl_coef": To(("rl.kl.coefficient",), number),
    "use_kl_loss": To(("rl.kl.place",), if_on("loss", "reward")),
    "kl_estimator": To(("rl.kl.estimator",), as_text),
    "kl_target": To(("rl.kl.target",), above_zero),
    "kl_horizon": To(("rl.kl.horizon",), only_if("kl_target", whole)),
    "unbiased_gradient": To(("rl.kl.unbiased_gradient",), only_if("use_kl_loss", switch)),
}

ADVANTAGES: dict[str, Rule] = {
    "advantage_estimator": Choice(
        {
            "gae": {"rl.advantage.estimator": "gae", "rl.advantage.whiten": "mean-and-deviation", "rl.critic": {}},
            "reinforce": {"rl.advantage.estimator": "returns", "rl.advantage.whiten": "mean-and-deviation"},
            "reinforce_baseline": {"rl.advantage.estimator": "group", "rl.advantage.whiten": "mean-and-deviation"},
            "rloo": {"rl.advantage.estimator": "leave-one-out"},
            "group_norm": {"rl.advantage.estimator": "group", "rl.advantage.divide_by_deviation": True},
            "dr_grpo": {"rl.advantage.estimator": "group"},
            "flash_reinforce": {"rl.advantage.estimator": "batch"},
        },
    ),
    "no_advantage_std_norm": To(("rl.advantage.whiten",), whitening),
    "gamma": To(("rl.advantage.gamma",), number),
    "lambd": To(("rl.advantage.gae_lambda",), of_critic(number)),
    "critic_learning_rate": To(("rl.critic.learning_rate",), of_critic(as_is)),
    "value_clip": To(("rl.critic.clip",), of_critic(above_zero)),
    "freezing_actor_steps": To(("rl.critic.steps_ahead",), of_critic(positive)),
    "critic_pretrain": "a critic starts from the first reward model that has the policy's tokenizer, or else from the policy.",
    **everywhere(
        "critic.optim critic.muon.lr critic.muon.momentum critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov "
        "critic.adam.betas critic.adam.eps critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio "
        "critic.min_lr_ratio critic.max_norm",
        "the critic has a learning rate of its own; optimiser and schedule are those of `rl.training`.",
    ),
}

REWARDS: dict[str, Rule] = {
    "agent_func_path": To(("rl.environment", "rl.rewards"), environment),
    "reward_pretrain": To(
        ("rl.rewards",),
        only_if("remote_rm_url", reward_models, "with --remote_rm_url OpenRLHF does not ask it.", answer=False),
    ),
    "remote_rm_url": To(("rl.rewards",), remote_rewards),
    "normalize_reward": To(("rl.rewards.normalise",), only_if("reward_pretrain", normalised)),
    "reward_clip_range": To(("rl.rewards.clip",), pair),
    "overlong_buffer_len": To(("rl.shaping.overlong_buffer",), positive),
    "overlong_penalty_factor": To(("rl.shaping.overlong_penalty",), only_if("overlong_buffer_len", number)),
    "stop_properly_penalty_coef": "the nearest is `rl.shaping.truncation_penalty`, which is subtracted from the reward of "
    "answers that were cut off instead of multiplying or replacing it.",
    "dynamic_filtering": To(("rl.filter",), always({})),
    "dynamic_filtering_reward_range": To(
        ("rl.filter.low", "rl.filter.high"),
        only_if("dynamic_filtering", lambda words, job: tuple(pair(words, job))),
    ),
}

POLICY: dict[str, Rule] = {
    "policy_loss_type": Choice({"ppo": {"rl.loss.loss_type": "clip"}, "gspo": {"rl.loss.loss_type": "gspo"}}),
    "loss_agg_mode": Choice(
        {
            "token-mean": {"rl.loss.aggregation": "token-mean"},
            "seq-mean-token-mean": {"rl.loss.aggregation": "sequence-mean-token-mean"},
        }
    ),
    "eps_clip": To(("rl.loss.clip_low", "rl.loss.clip_high"), clip),
    "eps_clip_low_high": To(("rl.loss.clip_low", "rl.loss.clip_high"), clip_bounds),
    "dual_clip": To(("rl.loss.dual_clip",), above_zero),
    "entropy_loss_coef": To(("rl.loss.entropy_bonus",), lambda words, job: above_zero(words, job) or 0.0),
    "vllm_is_correction_type": To(
        ("rl.mismatch.correction", "rl.mismatch.level"),
        only_if("enable_vllm_is_correction", older_correction),
    ),
    "enable_vllm_is_correction": To(("rl.mismatch",), always({}), "`correction`, `level` and bounds below"),
    "vllm_is_truncated_threshold": To(
        ("rl.mismatch.low", "rl.mismatch.high"),
        only_if("enable_vllm_is_correction", correction_bounds),
    ),
    "is_correction_level": Choice(
        {
            "off": {"rl.mismatch.correction": "none"},
            "token": {"rl.mismatch.level": "token"},
            "seq": {"rl.mismatch.level": "sequence"},
        }
    ),
    "is_correction_mode": To(("rl.mismatch.correction",), correction_of_level),
    "is_correction_gating": Choice(
        {
            "ratio": {"rl.mismatch.measure": "ratio"},
            "binary_kl": {"rl.mismatch.measure": "kl"},
            "tv": {"rl.mismatch.measure": "tv"},
        }
    ),
    "is_correction_threshold": To(
        ("rl.mismatch.low", "rl.mismatch.high"),
        bounds_of_level,
    ),
    "enable_ema": To(("rl.ema",), always({})),
    "ema_beta": To(("rl.ema.decay",), only_if("enable_ema", number)),
    "ptx_coef": "it belongs to demonstrations beside the prompts: add `rl.pretraining` with `data` and this `coefficient`.",
}

SAMPLING: dict[str, Rule] = {
    "n_samples_per_prompt": To(("rl.generation.num_generations",), whole),
    **everywhere(
        "generate_max_len max_new_tokens", To(both("generation.max_completion_length"), in_both(answers_length))
    ),
    "temperature": To(("rl.generation.temperature",), number),
    "top_p": unmodified(1.0, "rl.generation.top_p"),
    "rollout_batch_size": To(("rl.prompts_per_step",), whole),
    "num_episodes": To(("rl.steps",), number_of_steps, "from the number of prompts"),
    "vllm_generate_batch_size": "not needed: engines take all prompts of a step, and save every `rl.generation.shard_size`.",
    "async_train": To(("rl.execution.max_staleness",), lambda words, job: int(job.number("async_queue_size", 1))),
    "async_queue_size": To(("rl.execution.max_staleness",), only_if("async_train", whole)),
    "partial_rollout": To(("rl.execution.partial_rollouts",), only_if("async_train", switch)),
}

ENGINES: dict[str, Rule] = {
    "vllm_num_engines": To(
        ("resources.engines", "resources.placement"), lambda words, job: (positive(words, job), placement(words, job))
    ),
    "vllm_tensor_parallel_size": To(("resources.tensor_parallel_size",), whole),
    "vllm_gpu_memory_utilization": To(("resources.gpu_memory_utilization",), number),
    "colocate_all_models": To(("resources.placement",), placement),
    **everywhere(
        "actor_num_gpus_per_node actor_num_nodes", To(("resources.trainers",), trainers, "GPUs per node × nodes")
    ),
    **everywhere(
        "ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node critic_num_nodes "
        "critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward",
        "not needed: reference, critic and reward models share the trainers' GPUs; `resources.judges` is the number of a "
        "reward model's actors.",
    ),
    **everywhere(
        "vllm_enable_sleep deepspeed_enable_sleep",
        "not needed: what shares a GPU sleeps while others use it, by itself.",
    ),
    **everywhere(
        "vllm_sync_backend vllm_sync_with_ray", "not needed: weights travel by the way that the machine allows."
    ),
    **everywhere(
        "enable_prefix_caching enforce_eager max_num_seqs actor_init_on_gpu",
        "not needed: it is set for what a stage samples; further arguments of vLLM go into `resources.engine_options`.",
    ),
}

PROMPTS: dict[str, Rule] = {
    "prompt_data": To(("rl.prompts.sources",), sources),
    "prompt_split": To(("rl.prompts.sources.split",), as_text),
    "prompt_data_probs": To(("rl.prompts.mixing",), mixing, "and `weight` of each source"),
    "max_samples": To(("rl.prompts.sources.rows",), whole, "of each source"),
    "prompt_max_len": To(("rl.prompts.max_prompt_length", "rl.prompts.max_length"), prompts_length),
    "max_len": To(
        ("rl.prompts.max_prompt_length", "rl.prompts.max_length"), prompts_length, "what answers leave of it"
    ),
    "eval_dataset": To(("evaluation.prompts.sources",), with_split),
    "eval_split": To(
        ("evaluation.prompts.sources",), only_if("eval_dataset", nothing), "`split` of the source that is measured"
    ),
    "eval_temperature": To(("evaluation.generation.temperature",), only_if("eval_dataset", number)),
    "eval_n_samples_per_prompt": To(("evaluation.generation.num_generations",), only_if("eval_dataset", whole)),
    "input_key": To(both("prompts.sources.columns"), in_both(column("prompt"))),
    "label_key": To(both("prompts.sources.columns"), in_both(column("label"))),
    "input_template": To(both("prompts.prompt_template"), in_both(template)),
    "apply_chat_template": To(
        both("prompts.chat_template"), in_both(as_written), "the default, where there is a template"
    ),
    "eval_steps": "`evaluation` measures the policy at its end; `rl.best` has `eval_steps` and prompts for the time before.",
    "best_metric_key": "`rl.best` keeps the policy with the highest mean reward on held-out prompts.",
    **everywhere("image_key max_images_per_prompt freeze_visual_encoder", "does not exist here: models of text alone."),
}

PPO = Command(
    "rl",
    {
        **MODEL,
        **PROMPTS,
        **REWARDS,
        **ADVANTAGES,
        **POLICY,
        **KL,
        **SAMPLING,
        **COMMON,
        **ENGINES,
    },
    {"training": "rl.training", "data": "rl.prompts"},
    {
        **DEFAULTS,
        **AS_WRITTEN,
        "max_epochs": "1",
        "actor_learning_rate": "1e-6",
        "critic_learning_rate": "9e-6",
        "value_clip": "0.5",
        "rollout_batch_size": "1024",
        "n_samples_per_prompt": "1",
        "reward_clip_range": "-10 10",
        "advantage_estimator": "gae",
        "lambd": "1",
        "init_kl_coef": "0.01",
        "kl_estimator": "k1",
        "use_kl_loss": "false",
        "input_key": "input",
        "num_episodes": "1",
        "prompt_max_len": "1024",
        "generate_max_len": "1024",
        "vllm_is_correction_type": "tis",
        "eval_temperature": "0.6",
        "dynamic_filtering_reward_range": "0 1",
        "is_correction_mode": "mask",
        "is_correction_threshold": "0.5 5.0",
        "partial_rollout": "false",
    },
)
