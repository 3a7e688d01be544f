"""The names of a flag: those of OpenRLHF to 0.10, and the dotted ones since 0.11."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignment_core.migrate.rules import Rule

NAMES = {
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "adam.lr": "learning_rate",
    "adam.betas": "adam_betas",
    "adam.eps": "adam_eps",
    "adam.weight_decay": "l2",
    "model.model_name_or_path": "pretrain",
    "actor.model_name_or_path": "pretrain",
    "ref.model_name_or_path": "ref_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "critic.value_clip": "value_clip",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.save_value_network": "save_value_network",
    "ckpt.output_dir": "save_path",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "logger.wandb.key": "use_wandb",
    "logger.tensorboard_dir": "use_tensorboard",
    "model.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "model.loss_type": "loss",
    "train.async_enable": "async_train",
    "train.colocate_all": "colocate_all_models",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "actor.entropy_coef": "entropy_loss_coef",
}
"""Dotted names whose older ones do not follow from them."""


def canonical(flag: str, rules: Mapping[str, Rule]) -> str:
    """The name by which a table knows a flag; itself if it knows none."""
    groups = flag.removesuffix("_enable").split(".")
    of_policy = groups[1:] if groups[0] == "actor" else groups
    tries = (flag, NAMES.get(flag), NAMES.get(".".join(of_policy)), ".".join(of_policy), "_".join(groups[-2:]))
    last = () if groups[0] == "critic" else (groups[-1],)
    return next((one for one in (*tries, *last) if one in rules), flag)


def spellings(rules: Mapping[str, Rule]) -> Sequence[str]:
    """Every name that a user may mean, for hints."""
    return [*rules, *(dotted for dotted, name in NAMES.items() if name in rules)]
