"""Conversions of values, with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.migrate import Migration, migrate, read
from alignment_core.migrate.convert import PLAIN

Migrate = Callable[[str], Migration]
DPO = "train_dpo --pretrain acme/base --dataset rows.jsonl"
SFT = "train_sft --pretrain acme/base --dataset rows.jsonl --output_key output"
PPO = "train_ppo_ray --pretrain acme/base --prompt_data acme/prompts --reward_pretrain acme/judge --n_samples_per_prompt 4"
TRL = "--model_name_or_path acme/base --dataset_name acme/rows"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def at(migration: Migration, path: str) -> Any:
    node: Any = migration.recipe
    for step in path.split("."):
        node = node[int(step)] if step.isdigit() else node.get(step, {})
    return node


OPENRLHF = [
    (f"{DPO} --learning_rate 5e-7", "dpo.training.learning_rate", 5e-7),
    (f"{DPO} --train_batch_size 256 --micro_train_batch_size 2", "dpo.training.batch_size", 256),
    (DPO, "dpo.training.batch_size", 128),  # OpenRLHF's default
    (f"{DPO} --adam_betas 0.8 0.99", "dpo.training.adam_beta1", 0.8),
    (f"{DPO} --adam_betas 0.8 0.99", "dpo.training.adam_beta2", 0.99),
    (DPO, "dpo.training.adam_beta2", 0.95),
    (DPO, "dpo.training.min_lr_ratio", 0.1),
    (f"{DPO} --lr_scheduler cosine", "dpo.training.min_lr_ratio", {}),
    (f"{DPO} --lr_scheduler constant", "dpo.training.lr_scheduler_type", "constant"),
    (f"{DPO} --lr_scheduler constant", "dpo.training.warmup_ratio", 0),
    (f"{DPO} --lr_scheduler warmup_stable_decay", "dpo.training.lr_scheduler_type", "wsd"),
    (f"{DPO} --l2 0.01", "dpo.training.weight_decay", 0.01),
    (f"{DPO} --lora_rank 8 --load_in_4bit", "dpo.training.lora", {"r": 8, "lora_alpha": 16, "load_in_4bit": True}),
    (
        f"{DPO} --lora_rank 8 --target_modules q_proj v_proj",
        "dpo.training.lora.target_modules",
        ["q_proj", "v_proj"],
    ),
    (f"{DPO} --zero_stage 3", "resources.zero_stage", 3),
    (f"{DPO} --optim muon", "dpo.training.optimizer", "muon"),
    (f"{DPO} --wandb_run_name 'My Run #2'", "name", "my-run-2"),
    (f"{DPO} --nll_loss_coef 0.2", "dpo.loss.nll_weight", 0.2),
    (f"{DPO} --max_samples 100", "dpo.data.sources.0.rows", 100),
    (f"{DPO} --eval_dataset test.jsonl --eval_steps 50", "dpo.training.eval_steps", 50),
    (f"{DPO} --save_steps 200 --save_hf_ckpt", "dpo.training.save_steps", 200),
    (f"{DPO} --save_steps 200 --save_hf_ckpt --max_ckpt_num 2", "dpo.training.save_total_limit", 2),
    (f"{DPO} --save_steps -1 --save_hf_ckpt", "dpo.training.save_steps", {}),
    (f"{DPO} --use_tensorboard runs", "tracking.tensorboard", "runs"),
    (f"{DPO} --use_wandb key --wandb_project mine", "tracking.wandb", {"project": "mine"}),
    (f"{SFT} --input_key q", "sft.data.sources.0.columns", {"prompt": "q", "completion": "output"}),
    (SFT, "sft.data.prompt_template", "User: {prompt}\nAssistant: "),
    (SFT, "sft.data.chat_template", PLAIN),
    (f"{SFT} --input_template 'Q {{x}}: {{}}'", "sft.data.prompt_template", "Q {{x}}: {prompt}"),
    (f"{SFT} --apply_chat_template", "sft.data.chat_template", {}),
    # OpenRLHF saves the tokenizer with it
    (
        f"{SFT} --apply_chat_template --tokenizer_chat_template '{TEMPLATE}'",
        "model",
        {"name": "acme/base", "chat_template": TEMPLATE},
    ),
    (f"{SFT} --apply_chat_template --tokenizer_chat_template '{TEMPLATE}'", "sft.data.chat_template", {}),
    (
        "train_rm --model.model_name_or_path acme/base --data.dataset r.jsonl --data.apply_chat_template "
        f"--data.tokenizer_chat_template '{TEMPLATE}'",
        "model",
        {"name": "acme/base", "chat_template": TEMPLATE},
    ),
    (f"{SFT} --tokenizer_chat_template '{TEMPLATE}'", "sft.data.chat_template", PLAIN),
    (f"{SFT} --pretrain_mode --input_key body", "continued_pretraining.data.sources.0.columns", {"text": "body"}),
    (
        "train_sft --pretrain acme/base --dataset rows.jsonl --input_key chat --apply_chat_template",
        "sft.data.sources.0.columns",
        {"messages": "chat"},
    ),
    # 0.6 · nll + 0.4 · KL is 0.4 times 1.5 · nll + KL
    (
        "train_kd --pretrain acme/base --teacher_model acme/big --dataset rows.jsonl",
        "distillation.loss.nll_weight",
        1.5,
    ),
    ("train_kto --pretrain acme/base --dataset rows.jsonl", "kto.loss.beta", 0.01),
    (
        "train_prm --pretrain acme/base --dataset rows.jsonl --placeholder_token ки --reward_tokens + -",
        "process_reward_model.steps",
        {"placeholder": "ки", "verdict_tokens": ["+", "-"]},
    ),
    (
        "batch_inference --eval_task generate_vllm --pretrain acme/base --dataset rows.jsonl --best_of_n 8 --greedy_sampling",
        "generate.generation",
        {"max_completion_length": 1024, "num_generations": 8, "temperature": 0.0},
    ),
    (f"{PPO} --eps_clip 0.3", "rl.loss", {"epsilon": 0.3, "epsilon_high": 0.3}),
    (f"{PPO} --eps_clip 0.3 --eps_clip_low_high 0.2 0.28", "rl.loss.epsilon_high", 0.28),
    (f"{PPO} --init_kl_coef 0", "rl.kl.coefficient", 0),
    (f"{PPO} --init_kl_coef 0.05", "rl.kl", {"coefficient": 0.05, "place": "reward"}),  # k1 is the default there
    (f"{PPO} --use_kl_loss --kl_estimator k3", "rl.kl.place", "loss"),
    (f"{PPO} --use_kl_loss", "rl.kl.estimator", "k1"),
    (f"{PPO} --prompt_max_len 2048", "rl.prompts.max_length", 2048),
    (f"{PPO} --generate_max_len 512", "rl.generation.max_completion_length", 512),
    # 10,000 prompts twice, 1,000 a step
    (f"{PPO} --max_samples 10000 --num_episodes 2 --rollout_batch_size 1000", "rl.steps", 20),
    (f"{PPO} --value_clip 0.1 --freezing_actor_steps 3", "rl.critic.value_clip", 0.1),
    (f"{PPO} --freezing_actor_steps 3", "rl.critic.freezing_steps", 3),
    (f"{PPO} --advantage_estimator rloo", "rl.critic", {}),
    (f"{PPO} --advantage_estimator group_norm", "rl.advantage.scale_rewards", "group"),
    (f"{PPO} --reward_clip_range -5 5", "rl.rewards.0.clip", [-5.0, 5.0]),
    (PPO.replace("acme/judge", "acme/a,acme/b"), "rl.rewards.1.reward_model", "acme/b"),
    (
        PPO.replace("--reward_pretrain acme/judge", "--remote_rm_url http://a/r,http://b/r"),
        "rl.rewards.0.urls",
        ["http://a/r", "http://b/r"],
    ),
    (
        PPO.replace("--reward_pretrain acme/judge", "--remote_rm_url rewards.py"),
        "rl.rewards.0.function",
        "rewards.py:reward_func",
    ),
    (f"{PPO} --dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9", "rl.filter", {"low": 0.1, "high": 0.9}),
    (f"{PPO} --overlong_buffer_len 256", "rl.shaping.overlong_buffer", 256),
    (f"{PPO} --entropy_loss_coef 0.01", "rl.loss.entropy_coef", 0.01),
    (
        f"{PPO} --enable_vllm_is_correction --vllm_is_truncated_threshold 2",
        "rl.importance_sampling_correction",
        {"mode": "clip", "high": 2.0},
    ),
    (
        f"{PPO} --enable_vllm_is_correction --vllm_is_correction_type icepop --vllm_is_truncated_threshold 0.5 5",
        "rl.importance_sampling_correction",
        {"mode": "mask", "level": "token", "low": 0.5, "high": 5.0},
    ),
    (f"{PPO} --async_train", "rl.execution", {"max_staleness": 1, "partial_rollouts": False}),
    (f"{PPO} --async_train --async_queue_size 3 --partial_rollout", "rl.execution.max_staleness", 3),
    (f"{PPO} --vllm_num_engines 4 --colocate_all_models", "resources.placement", "colocated"),
    (f"{PPO} --vllm_num_engines 4", "resources.placement", "disaggregated"),
    (f"{PPO} --actor_num_nodes 2 --actor_num_gpus_per_node 4", "resources.trainers", 8),
    (
        f"{PPO} --critic_num_nodes 2 --critic_num_gpus_per_node 4 --ref_num_gpus_per_node 2 --reward_num_gpus_per_node 3",
        "resources.models",
        {"critic": {"gpus": 8}, "reference": {"gpus": 2}, "reward": {"gpus": 3}},
    ),
    (
        f"{PPO} --critic_num_gpus_per_node 4 --ref_num_gpus_per_node 2 --reward_num_gpus_per_node 4 --colocate_critic_reward "
        "--colocate_actor_ref",
        "resources.models",
        {"critic": {"gpus": 4}, "reward": {"colocate_with": "critic"}},
    ),
    (f"{PPO} --enable_ema --ema_beta 0.99", "rl.ema.decay", 0.99),
    (
        f"{PPO} --eval_dataset acme/test --input_key q --eval_temperature 0.6",
        "evaluation",
        {
            "prompts": {"sources": [{"path": "acme/test", "columns": {"prompt": "q"}}], "chat_template": PLAIN},
            "generation": {"temperature": 0.6, "max_completion_length": 1024},
        },
    ),
    (
        f"{PPO} --eval_dataset acme/a,t.jsonl --eval_split dev --input_key prompt",
        "evaluation.prompts.sources",
        [{"path": "acme/a", "split": "dev"}, {"path": "t.jsonl", "split": "dev"}],
    ),
    (f"{PPO} --eval_dataset acme/a --input_template 'Q: {{}}'", "evaluation.prompts.prompt_template", "Q: {prompt}"),
    (f"{PPO} --generate_max_len 512", "rl.prompts.max_prompt_length", 1024),
    (f"{PPO} --remote_rm_url http://a", "rl.rewards", [{"urls": ["http://a"], "clip": [-10.0, 10.0]}]),
    (f"{PPO} --dynamic_filtering", "rl.filter", {"low": 0.0, "high": 1.0}),
    (DPO, "dpo.data.chat_template", PLAIN),
    (f"{DPO} --apply_chat_template", "dpo.data.chat_template", {}),
    (f"{DPO} --ring_attn_size 4 --overlap_comm", "resources.sequence_parallel_size", 4),
    (f"{DPO} --ring_attn_size 4 --overlap_comm", "resources.overlap_comm", True),
    (f"{DPO} --ds_tensor_parallel_size 2", "resources.trainer_tensor_parallel_size", 2),
    (f"{DPO} --eval_dataset acme/test", "dpo.data.sources.1", {"path": "acme/test", "held_out": True, "split": "test"}),
    (f"{DPO} --eval_dataset test.jsonl", "dpo.data.sources.1", {"path": "test.jsonl", "held_out": True}),
    ("train_kto --dataset a/b --eval_dataset a/t", "kto.data.sources.1.split", "test"),
    ("train_kd --dataset a/b --eval_dataset a/t", "distillation.data.sources.1.split", "test"),
    ("train_prm --dataset a/b --eval_dataset a/t", "process_reward_model.data.sources.1.split", "test"),
    ("train_sft --dataset a/b --eval_dataset a/t", "sft.data.sources.1.split", {}),
    (f"{DPO},b/c --dataset_probs 0.9,0.1", "dpo.data.mixing", "all_exhausted"),
    (f"{DPO} --dataset_probs 1.0", "dpo.data.mixing", {}),
    (f"{SFT} --apply_chat_template", "sft.data.assistant_turns", "last"),
    (f"{SFT} --apply_chat_template --multiturn", "sft.data.assistant_turns", "all"),
    # dotted, of 0.11
    ("train_dpo --model.model_name_or_path acme/base --data.dataset r.jsonl --adam.lr 2e-6", "model", "acme/base"),
    ("train_dpo --model.model_name_or_path acme/base --data.dataset r.jsonl", "dpo.training.bf16", True),
    ("train_dpo --data.dataset r.jsonl --adam.lr 2e-6 --model.ipo_enable", "dpo.loss.loss_type", "ipo"),
    ("train_ppo_ray --actor.adam.lr 2e-6 --critic.adam.lr 3e-6", "rl.training.learning_rate", 2e-6),
    ("train_ppo_ray --actor.adam.lr 2e-6 --critic.adam.lr 3e-6", "rl.critic.learning_rate", 3e-6),
    ("train_ppo_ray --actor.adam.betas 0.9 0.98 --critic.adam.betas 0.8 0.99", "rl.critic.adam_beta1", 0.8),
    ("train_ppo_ray --actor.adam.betas 0.9 0.98 --critic.adam.betas 0.8 0.99", "rl.critic.adam_beta2", 0.99),
    ("train_ppo_ray --actor.adam.betas 0.9 0.98 --critic.adam.betas 0.8 0.99", "rl.training.adam_beta2", 0.98),
    ("train_ppo_ray --critic.adam.eps 1e-5 --critic.adam.weight_decay 0.1", "rl.critic.adam_epsilon", 1e-5),
    ("train_ppo_ray --critic.adam.eps 1e-5 --critic.adam.weight_decay 0.1", "rl.critic.weight_decay", 0.1),
    ("train_ppo_ray --critic.lr_scheduler linear", "rl.critic.lr_scheduler_type", "linear"),
    ("train_ppo_ray --critic.lr_warmup_ratio 0.1 --lr_warmup_ratio 0.2", "rl.critic.warmup_ratio", 0.1),
    ("train_ppo_ray --critic.min_lr_ratio 0.5 --critic.max_norm 2", "rl.critic.min_lr_ratio", 0.5),
    ("train_ppo_ray --critic.min_lr_ratio 0.5 --critic.max_norm 2", "rl.critic.max_grad_norm", 2.0),
    ("train_ppo_ray --data.max_len 4096 --rollout.max_new_tokens 3072", "rl.prompts.max_prompt_length", 1024),
    ("train_ppo_ray --data.max_len 4096 --rollout.max_new_tokens 1024", "rl.prompts.max_prompt_length", 3072),
    ("train_ppo_ray --data.max_len 4096", "rl.generation.max_completion_length", 2048),
    ("train_ppo_ray --actor.adam.lr 2e-6", "rl.importance_sampling_correction", {"mode": "none"}),  # of 0.11, in bf16
    ("train_ppo_ray --bf16", "rl.importance_sampling_correction", {"mode": "none"}),
    ("train_ppo_ray", "rl.importance_sampling_correction", {}),
    (
        "train_ppo_ray --algo.advantage.is_correction_level seq --algo.advantage.is_correction_gating binary_kl "
        "--algo.advantage.is_correction_threshold 0.01",
        "rl.importance_sampling_correction",
        {"level": "sequence", "mode": "mask", "measure": "kl", "high": 0.01},
    ),
    (
        "train_ppo_ray --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv "
        "--algo.advantage.is_correction_threshold 0.0 0.2",
        "rl.importance_sampling_correction",
        {"level": "token", "mode": "mask", "measure": "tv", "low": 0.0, "high": 0.2},
    ),
    (
        "train_ppo_ray --algo.advantage.is_correction_gating tv",  # of a correction that is off
        "rl.importance_sampling_correction",
        {"mode": "none"},
    ),
]


@pytest.mark.parametrize(("command", "path", "value"), OPENRLHF)
def test_openrlhf(command: str, path: str, value: Any, migrated: Migrate):
    assert at(migrated(f"python -m openrlhf.cli.{command}"), path) == value


TWO_OF_ZERO2 = f"trl sft {TRL} --num_processes 2 --accelerate_config zero2"
TRL_ROWS = [
    # 4 per device, 8 steps of accumulation, 2 processes
    (
        f"accelerate launch --num_processes 2 trl/scripts/sft.py {TRL} --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 8",
        "sft.training.batch_size",
        64,
    ),
    (f"trl sft {TRL} --num_processes 2", "sft.training.batch_size", 16),
    (f"trl sft {TRL} --num_processes 2", "resources.trainers", 2),
    (f"trl sft {TRL} --accelerate_config zero3", "resources.zero_stage", 3),
    (
        f"""trl grpo {TRL} --reward_funcs accuracy_reward --chat_template_kwargs '{{"enable_thinking": false}}'""",
        "model.chat_template_kwargs",
        {"enable_thinking": False},
    ),
    (
        f"""trl grpo {TRL} --reward_funcs accuracy_reward --generation_kwargs '{{"stop": "</answer>"}}'""",
        "rl.generation.stop",
        ["</answer>"],
    ),
    (f"trl sft {TRL} --eos_token '<|im_end|>'", "model.eos_token", "<|im_end|>"),
    (f"trl sft {TRL} --completion_only_loss false", "sft.data.completion_only_loss", False),
    (f"trl sft {TRL} --completion_only_loss true", "sft.data.completion_only_loss", {}),
    (f"trl sft {TRL}", "sft.training.learning_rate", 2e-5),
    (f"trl sft {TRL}", "sft.training.num_train_epochs", 3),
    (f"trl sft {TRL}", "sft.training.lr_scheduler_type", "linear"),
    (f"trl sft {TRL}", "sft.training.warmup_ratio", 0),  # TRL's warmup_steps, where our default is above 0
    (f"trl sft {TRL} --warmup_steps 20", "sft.training.warmup_ratio", {}),
    (f"trl sft {TRL} --warmup_ratio 0.1", "sft.training.warmup_ratio", 0.1),
    (f"trl sft {TRL} --lr_scheduler_type constant --warmup_ratio 0.1", "sft.training.warmup_ratio", 0),
    (f"trl grpo {TRL} --reward_model_name_or_path a/judge", "rl.kl.coefficient", 0),
    (f"trl grpo {TRL} --reward_model_name_or_path a/judge --beta 0.04", "rl.kl.coefficient", 0.04),
    (f"trl grpo {TRL} --reward_funcs a.b", "rl.kl", {}),
    (f"trl rloo {TRL} --reward_model_name_or_path a/judge", "rl.kl.coefficient", 0.05),
    (f"trl sft {TRL}", "sft.training.bf16", True),
    (f"trl sft {TRL} --bf16 false", "sft.training.bf16", False),
    (f"trl sft {TRL} --no_bf16", "sft.training.bf16", False),
    (f"trl sft {TRL} --no_gradient_checkpointing", "resources.gradient_checkpointing", False),
    (f"trl sft {TRL} --num-train-epochs 2.0", "sft.training.num_train_epochs", 2),
    (f"trl sft {TRL} --neftune_noise_alpha 5", "sft.neftune_noise_alpha", 5.0),
    (f"trl reward {TRL} --center_rewards_coefficient 0.01", "reward_model.center_rewards_coefficient", 0.01),
    (f"trl sft {TRL} --optim adamw_bnb_8bit", "sft.training.optimizer", "adamw_8bit"),
    (f"trl sft {TRL} --optim paged_adamw_8bit", "sft.training.optimizer", "paged_adamw_8bit"),
    (f"trl sft {TRL} --warmup_steps 0.1", "sft.training.warmup_ratio", 0.1),
    (f"trl sft {TRL} --warmup_steps 20 --max_steps 400", "sft.training.warmup_steps", 20),
    (f"trl sft {TRL} --num_train_epochs 0.5", "sft.training.num_train_epochs", 0.5),
    # 8 x 4 completions per round and 8 per optimizer step, twice each: 8 optimizer steps per step here
    (
        f"trl grpo {TRL} --gradient_accumulation_steps 1 --steps_per_generation 4 --num_iterations 2 --warmup_steps 20",
        "rl.training.warmup_steps",
        3,
    ),
    (f"trl grpo {TRL} --warmup_steps 0.1", "rl.training.warmup_ratio", 0.1),
    (f"trl sft {TRL} --max_steps -1", "sft.training.max_steps", {}),
    (f"trl sft {TRL} --use_peft", "sft.training.lora", {"lora_dropout": 0.05}),  # rank 16 and α 32 are ours, too
    (f"trl sft {TRL} --use_peft --lora_r 64", "sft.training.lora.r", 64),
    (f"trl sft {TRL} --use_peft --load_in_8bit", "sft.training.lora.load_in_8bit", True),
    (
        f"trl sft {TRL} --use_peft --lora_target_modules q_proj k_proj",
        "sft.training.lora.target_modules",
        ["q_proj", "k_proj"],
    ),
    (
        f"trl sft {TRL} --use_peft --lora_dropout 0 --lora_target_parameters experts.gate_up_proj experts.down_proj",
        "sft.training.lora",
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0},
    ),
    (f"trl sft {TRL} --dataset_text_field body", "continued_pretraining.data.sources.0.columns", {"text": "body"}),
    (f"trl sft {TRL} --dataset_config main --dataset_train_split all", "sft.data.sources.0.subset", "main"),
    (
        f"trl sft {TRL} --eval_strategy steps --eval_steps 50",
        "sft.data.sources.1",
        {"path": "acme/rows", "split": "test", "held_out": True},
    ),
    (f"trl sft {TRL} --eval_strategy steps --eval_steps 50", "sft.training.eval_steps", 50),
    (f"trl sft {TRL} --eval_strategy steps --eval_on_start False", "sft.training.eval_on_start", False),
    (f"trl sft {TRL} --save_steps 50 --save_total_limit 3", "sft.training.save_steps", 50),
    (f"trl dpo {TRL} --save_strategy steps --save_steps 50 --save_total_limit 3", "dpo.training.save_total_limit", 3),
    (f"trl sft {TRL} --save_strategy no --save_steps 50", "sft.training.save_steps", {}),
    (f"trl sft {TRL} --report_to wandb --project mine", "tracking.wandb", {"project": "mine"}),
    (f"trl sft {TRL} --model_revision v2", "model", {"name": "acme/base", "revision": "v2"}),
    (f"trl dpo {TRL} --loss_type ipo", "dpo.loss.loss_type", "ipo"),
    (
        f"trl dpo {TRL} --loss_type sigmoid apo_zero --loss_weights 0.8 0.2",
        "dpo.loss.loss_weights",
        {"sigmoid": 0.8, "apo_zero": 0.2},
    ),
    (
        f"trl dpo {TRL} --loss_type sigmoid sft --loss_weights 1.0 0.5",
        "dpo.loss",
        {"loss_type": "sigmoid", "nll_weight": 0.5},
    ),
    (f"trl dpo {TRL} --f_divergence_type js_divergence", "dpo.loss.f_divergence_type", "js_divergence"),
    (
        f"trl dpo {TRL} --f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.3",
        "dpo.loss",
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    ),
    (f"trl dpo {TRL} --ld_alpha 0.4", "dpo.loss.ld_alpha", 0.4),
    (f"trl kto {TRL} --sync_ref_model --ref_model_sync_steps 64", "kto.loss.sync_ref_model", {"sync_steps": 64}),
    (f"trl dpo {TRL} --sync_ref_model --ref_model_sync_steps 64", "dpo.loss.sync_ref_model.sync_steps", 64),
    (f"trl kto {TRL} --loss_type apo_zero_unpaired", "kto.loss.loss_type", "apo_zero_unpaired"),
    (f"trl reward {TRL}", "reward_model.training.learning_rate", 1e-4),
    # 8 completions per device, 4 steps of accumulation, 2 processes: 64 completions of 8 prompts
    (
        f"trl grpo {TRL} --num_processes 2 --gradient_accumulation_steps 4 --num_generations 8",
        "rl.prompts_per_step",
        8,
    ),
    (f"trl grpo {TRL} --num_processes 2 --gradient_accumulation_steps 4", "rl.training.batch_size", 64),
    (f"trl grpo {TRL} --max_steps 100", "rl.steps", 100),
    # 128 completions are sampled at once, 32 are a step: 4 steps of the optimiser for one of ours
    (
        f"trl grpo {TRL} --num_processes 1 --per_device_train_batch_size 32 --generation_batch_size 128 --max_steps 100",
        "rl.steps",
        25,
    ),
    (f"trl grpo {TRL} --num_iterations 2 --max_steps 100", "rl.steps", 50),
    (f"trl grpo {TRL}", "rl.advantage", {"scale_rewards": "group", "estimator": "group"}),
    (f"trl grpo {TRL} --top_entropy_quantile 0.2", "rl.loss.top_entropy_quantile", 0.2),
    (f"trl grpo {TRL} --scale_rewards batch", "rl.advantage.scale_rewards", "batch"),
    (f"trl grpo {TRL} --scale_rewards false", "rl.advantage.scale_rewards", "none"),
    (f"trl grpo {TRL} --loss_type dr_grpo", "rl.loss.aggregation", "fixed-length"),
    (f"trl grpo {TRL} --epsilon 0.1 --epsilon_high 0.28", "rl.loss", {"epsilon": 0.1, "epsilon_high": 0.28}),
    (f"trl grpo {TRL} --importance_sampling_level sequence", "rl.loss.loss_type", "gspo"),
    (
        f"trl grpo {TRL} --importance_sampling_level sequence",
        "rl.loss.epsilon_high",
        0.2,
    ),  # TRL's own, whose GSPO has no other
    (f"trl grpo {TRL} --importance_sampling_level sequence --epsilon 3e-4", "rl.loss.epsilon", 3e-4),
    (f"trl grpo {TRL} --loss_type cispo --epsilon_high 5", "rl.loss", {"epsilon_high": 5.0, "loss_type": "cispo"}),
    (
        f"trl grpo {TRL} --use_vllm",
        "rl.importance_sampling_correction",
        {"mode": "mask", "level": "sequence", "high": 3.0},
    ),
    (f"trl grpo {TRL}", "rl.importance_sampling_correction", {}),
    (
        f"trl grpo {TRL} --use_vllm --vllm_importance_sampling_correction false",
        "rl.importance_sampling_correction",
        {"mode": "none"},
    ),
    (f"trl grpo {TRL} --sapo_temperature_neg 1.2", "rl.loss.sapo_temperatures", [1.0, 1.2]),
    (
        f"trl grpo {TRL} --reward_model_name_or_path acme/judge --reward_funcs mine.right accuracy_reward "
        "--reward_weights 1 0.5 0.2",
        "rl.rewards",
        [
            {"reward_model": "acme/judge", "weight": 1.0},
            {"function": "mine.py:right", "weight": 0.5},
            {"function": "trl.rewards:accuracy_reward", "weight": 0.2},
        ],
    ),
    (
        f"trl grpo {TRL} --beta 0.1 --sync_ref_model --ref_model_mixup_alpha 1 --ref_model_sync_steps 50",
        "rl.kl.sync_ref_model",
        {"mixup_alpha": 1.0, "sync_steps": 50},
    ),
    (
        f"trl grpo {TRL} --beta 0.1 --sync_ref_model --ref_model_sync_steps 64 --num_iterations 4",
        "rl.kl.sync_ref_model",
        {"sync_steps": 16},  # TRL counts optimizer steps
    ),
    (
        f"trl grpo {TRL} --beta 0.1 --sync_ref_model --num_iterations 4",
        "rl.kl.sync_ref_model",
        {"sync_steps": 128},
    ),
    (f"trl rloo {TRL}", "rl.importance_sampling_correction", {"mode": "none"}),
    (f"trl rloo {TRL}", "rl.advantage.estimator", "leave-one-out"),
    (f"trl rloo {TRL}", "rl.kl", {"coefficient": 0.05, "place": "reward", "estimator": "k1"}),
    (f"trl rloo {TRL}", "rl.loss.aggregation", "fixed-length"),
    (f"trl grpo {TRL} --loss_type sapo", "rl.loss.aggregation", "sequence-mean-token-mean"),
    (f"trl grpo {TRL} --loss_type cispo --epsilon 0.2 --epsilon_high 5", "rl.loss.epsilon_high", 5.0),
    (f"trl grpo {TRL} --loss_type cispo --epsilon 0.2 --epsilon_high 5", "rl.loss.epsilon", 1.0),
    (f"trl grpo {TRL} --beta 0.04", "rl.kl", {"coefficient": 0.04, "unbiased_gradient": True}),
    (f"trl grpo {TRL}", "rl.kl", {}),
    (f"torchrun --nnodes 2 --nproc_per_node 8 trl/scripts/sft.py {TRL}", "resources.trainers", 16),
    (f"trl sft {TRL} --accelerate_config zero2", "resources.trainers", 8),
    # 4 per device, 8 processes of TRL's file; an explicit number of processes overrides that of the file
    (f"trl sft {TRL} --accelerate_config zero2 --per_device_train_batch_size 4", "sft.training.batch_size", 32),
    (f"trl sft {TRL} --accelerate_config single_gpu --per_device_train_batch_size 4", "sft.training.batch_size", 4),
    (f"{TWO_OF_ZERO2} --per_device_train_batch_size 4", "sft.training.batch_size", 8),
    (TWO_OF_ZERO2, "resources", {"zero_stage": 2, "trainers": 2, "gradient_checkpointing": True}),
    # 8 processes × 8 completions ÷ 8 for each prompt
    (f"trl grpo {TRL} --accelerate_config multi_gpu", "rl.prompts_per_step", 8),
    (f"trl rloo {TRL} --normalize_advantages", "rl.advantage.whiten", "mean-and-deviation"),
]


@pytest.mark.parametrize(("command", "path", "value"), TRL_ROWS)
def test_trl(command: str, path: str, value: Any, migrated: Migrate):
    assert at(migrated(command), path) == value


REFUSED = [
    (f"python -m openrlhf.cli.{DPO} --lr_scheduler polynomial", "--lr_scheduler", "not one of cosine_with_min_lr"),
    (f"python -m openrlhf.cli.{DPO} --lora_alpha 32", "--lora_alpha", "--lora_rank"),
    (f"python -m openrlhf.cli.{DPO} --eval_steps 10", "--eval_steps", "test_rows"),
    (f"python -m openrlhf.cli.{DPO} --save_steps 200", "--save_steps", "`resources.progress_seconds`"),
    (f"python -m openrlhf.cli.{DPO} --save_steps 9 --max_ckpt_num 3", "--max_ckpt_num", "for resuming alone"),
    (f"python -m openrlhf.cli.{PPO} --save_steps 20 --save_hf_ckpt", "--save_steps", "`rl.training.save_steps`"),
    (f"trl sft {TRL} --save_steps 0.1", "--save_steps", "not a whole number"),
    (f"trl sft {TRL} --save_steps 0.1 --save_total_limit 3", "--save_total_limit", "not a whole number"),
    (f"trl sft {TRL} --save_steps 500 --max_steps 100", "--save_steps", "training ends before the first one"),
    (f"trl sft {TRL} --save_strategy epoch --save_steps 10", "--save_steps", "no effect with --save_strategy"),
    (f"trl sft {TRL} --save_strategy epoch", "--save_strategy", "steps of an epoch"),
    (f"trl grpo {TRL} --save_steps 10", "--save_steps", "`rl.training.save_steps`"),
    (f"python -m openrlhf.cli.{DPO} --max_epochs many", "--max_epochs", "is not a number"),
    (f"python -m openrlhf.cli.{DPO} --param_dtype fp16", "--param_dtype", "`bf16`"),
    (
        f"python -m openrlhf.cli.{SFT} --tokenizer_chat_template '{TEMPLATE}'",
        "--tokenizer_chat_template",
        "--apply_chat_template, which is not given",
    ),
    (f"python -m openrlhf.cli.{DPO} --input_template 'Q: {{}}'", "--input_template", "--prompt_key"),
    (f"python -m openrlhf.cli.{PPO} --advantage_estimator rloo --value_clip 0.2", "--value_clip", "gae alone"),
    (f"python -m openrlhf.cli.{PPO} --top_p 0.9", "--top_p", "policy itself"),
    (f"python -m openrlhf.cli.{PPO} --critic.optim muon", "--critic.optim", "`rl.training`"),
    (f"python -m openrlhf.cli.{PPO} --advantage_estimator rloo --critic.max_norm 2", "--critic.max_norm", "gae alone"),
    (f"trl dpo {TRL} --loss_type aot", "--loss_type", "not supported"),
    (f"trl grpo {TRL} --num_iterations 1.5", "--num_iterations", "not a whole number"),
    (f"trl sft {TRL} --eval_steps 5", "--eval_steps", "--eval_strategy"),
    (f"trl sft {TRL} --eval_on_start", "--eval_on_start", "--eval_strategy"),
    (f"trl grpo {TRL} --eval_on_start", "--eval_on_start", "`rl.best`"),
    (f"trl sft {TRL} --lora_r 8", "--lora_r", "--use_peft"),
    (f"trl sft {TRL} --load_in_8bit", "--load_in_8bit", "--use_peft"),
    (f"trl sft {TRL} --lora_target_parameters experts.down_proj", "--lora_target_parameters", "--use_peft"),
    (f"trl sft {TRL} --fp16", "--fp16", "`bf16`"),
    (f"trl grpo {TRL} --temperature 0.7 --top_k 50", "--top_k", "policy itself"),
    (f"trl grpo {TRL} --loss_type vespo", "--loss_type", "VESPO"),
    (f"trl grpo {TRL} --reward_funcs get_soft_overlong_punishment", "--reward_funcs", "rl.shaping"),
    (f"trl sft {TRL} --push_to_hub --hub_token hf_x", "--hub_token", "promotion.publish"),
    (f"trl dpo {TRL} --label_smoothing 0.1", "--label_smoothing", "robust and exo_pair"),
    (f"python -m openrlhf.cli.{DPO} --max_epochs inf", "--max_epochs", "not a valid value"),
    (f"python -m openrlhf.cli.{DPO} --adam_betas 0.9", "--adam_betas", "not a valid value"),
    (f"trl grpo {TRL} --top_k", "--top_k", "not a valid value"),
    (f"trl sft {TRL} --accelerate_config fsdp1", "--accelerate_config", "not one of zero1"),
    ("trl sft --model_name_or_path acme/base --eval_strategy steps", "--eval_strategy", "`test_rows`"),
    ("trl sft --model_name_or_path acme/base --dataset_name ''", "--dataset_name", "a path or name is needed"),
    ("trl sft --model_name_or_path '' --dataset_name acme/rows", "--model_name_or_path", "a path or name is needed"),
    ("python -m openrlhf.cli.train_sft --dataset a/b,", "--dataset", "a path or name is needed"),
    (f"trl grpo {TRL} --reward_funcs mine.right --reward_weights a", "--reward_funcs", "not a valid value"),
    (
        f"""trl grpo {TRL} --reward_funcs accuracy_reward --generation_kwargs '{{"stop": "x", "n": 2}}'""",
        "--generation_kwargs",
        "n: samples come from the policy itself",
    ),
    (
        f"trl grpo {TRL} --reward_funcs accuracy_reward --generation_kwargs x",
        "--generation_kwargs",
        "is not a JSON object",
    ),
    (f"trl grpo {TRL} --loss_type sapo --epsilon 0.1", "--epsilon", "SAPO has no clip bounds"),
]


@pytest.mark.parametrize(("command", "flag", "why"), REFUSED)
def test_flags_without_a_counterpart_have_a_reason(command: str, flag: str, why: str, migrated: Migrate):
    report = {item.flag: item.why for item in migrated(command).without}
    assert why in report[flag]
    assert report[flag].endswith(".")


def test_cispo_without_an_upper_bound_has_a_remark_with_the_bound_that_trl_takes(migrated: Migrate):
    """`torch.clamp(ratio, max=epsilon_high)` in TRL 1.16's GRPOTrainer, where `epsilon_high` is `epsilon` unless it is set."""
    remarks = migrated(f"trl grpo {TRL} --loss_type cispo").to_do
    assert any("cuts the weight of a token at ε = 0.2" in remark for remark in remarks)
    remarks = migrated(f"trl grpo {TRL} --loss_type cispo --epsilon_high 5").to_do
    assert not any("cuts the weight" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("command", "sentence", "remarked"),
    [
        ("rloo --normalize_advantages", "all tokens of a step", True),  # of its completions, in TRL's RLOOTrainer
        ("rloo --normalize_advantages false", "all tokens of a step", False),
        ("grpo --entropy_coef 0.01 --loss_type dr_grpo", "a mean over tokens with every loss", True),
        ("grpo --entropy_coef 0.01 --loss_type grpo", "a mean over tokens with every loss", True),
        ("grpo --entropy_coef 0.01", "a mean over tokens with every loss", False),  # DAPO's loss is one, too
        ("grpo --loss_type dr_grpo", "a mean over tokens with every loss", False),
    ],
)
def test_averages_that_differ_from_trls_have_a_remark(
    command: str, sentence: str, remarked: bool, migrated: Migrate
) -> None:
    assert any(sentence in remark for remark in migrated(f"trl {command} {TRL}").to_do) == remarked


def test_local_prompts_are_counted(migrated: Migrate, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"input": "a"}\n' * 10)
    migration = migrated(
        f"python -m openrlhf.cli.{PPO.replace('acme/prompts', 'prompts.jsonl')} --rollout_batch_size 4"
    )
    assert at(migration, "rl.steps") == 3


def test_steps_are_left_to_the_user_if_prompts_cannot_be_counted(migrated: Migrate):
    assert any("`rl.steps`" in item for item in migrated(f"python -m openrlhf.cli.{PPO}").to_do)


def test_weights_of_several_data_sets(migrated: Migrate):
    migration = migrated(
        "python -m openrlhf.cli.train_dpo --pretrain a/b --dataset a/x,y.jsonl --dataset_probs 0.7,0.3"
    )
    assert at(migration, "dpo.data.sources") == [{"path": "a/x", "weight": 0.7}, {"path": "y.jsonl", "weight": 0.3}]


def test_paths_are_relative_to_the_recipe(tmp_path: Path):
    (tmp_path / "base").mkdir()
    command = "python -m openrlhf.cli.train_dpo --pretrain ./base --dataset mine.jsonl,/data/x.jsonl,acme/rows"
    migration = migrate(read(command), tmp_path, tmp_path / "recipes")
    assert migration.recipe["model"] == "../base"
    assert [item["path"] for item in at(migration, "dpo.data.sources")] == [
        "../mine.jsonl",
        "/data/x.jsonl",
        "acme/rows",
    ]


def test_flags_take_precedence_over_a_configuration_file_of_trl(migrated: Migrate, tmp_path: Path):
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: acme/base\nlearning_rate: 1.0e-4\nbf16: false\nloss_type: [sigmoid, sft]\n"
        "datasets:\n  - {path: acme/rows, split: all, fraction: 0.5}\n  - {path: acme/more, fraction: 0.5}\nmy_own: 3\n"
    )
    migration = migrated("trl dpo --config c.yaml --learning_rate 5e-7")
    assert migration.loads, migration.to_do
    assert at(migration, "dpo.training.learning_rate") == 5e-7
    assert at(migration, "dpo.loss.nll_weight") == 1.0
    assert at(migration, "dpo.data.sources") == [
        {"path": "acme/rows", "split": "all", "weight": 0.5},
        {"path": "acme/more", "weight": 0.5},
    ]
    assert [item.flag for item in migration.unknown] == ["--my_own"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=(--pretrain a/b)\nA+=(--beta 0.5)\npython -m openrlhf.cli.train_dpo ${A[@]} --dataset c/d", {"beta": 0.5}),
        ('B="--beta"\nB+=" 0.5"\npython -m openrlhf.cli.train_dpo --pretrain a/b --dataset c/d $B', {"beta": 0.5}),
        ("srun --job-name train_sft python -m openrlhf.cli.train_dpo --beta 0.5", {"beta": 0.5}),
        ("mkdir -p ckpt/train_sft\npython -m openrlhf.cli.train_dpo --beta 0.5", {"beta": 0.5}),
        ("ray job submit --env='{\n\"a\": 1}' -- python3 -m openrlhf.cli.train_dpo --beta 0.5", {"beta": 0.5}),
    ],
)
def test_a_script_of_many_lines(text: str, expected: dict[str, Any], migrated: Migrate):
    assert at(migrated(text), "dpo.loss") == expected


def test_unset_shell_variables_are_reported(migrated: Migrate):
    migration = migrated(f"python -m openrlhf.cli.{DPO} --beta 0.5 --gradient_checkpointing $EXTRA")
    assert any("replaced $EXTRA" in item for item in migration.to_do)


@pytest.mark.parametrize("test_split", ["", "test_split_size: 0.1\n"])
@pytest.mark.parametrize("named", ["", "dataset_name: acme/ignored\ndataset_config: hard\n"])
def test_a_mixture_of_trl_has_no_split_to_evaluate_on(test_split: str, named: str, migrated: Migrate, tmp_path: Path):
    """TRL ignores `dataset_name` and its configuration beside `datasets`."""
    (tmp_path / "c.yaml").write_text(
        f"model_name_or_path: acme/base\ndatasets:\n  - path: acme/rows\n{test_split}{named}"
        "eval_strategy: steps\neval_steps: 50\ndataset_test_split: dev\n"
    )
    migration = migrated("trl sft --config c.yaml")
    assert migration.loads, migration.to_do
    assert at(migration, "sft.data.sources") == [{"path": "acme/rows"}]
    assert at(migration, "sft.training.eval_steps") == {}
    reasons = {item.flag: item.why for item in migration.without}
    for flag in ("--eval_strategy", "--eval_steps", *(["--test_split_size"] if test_split else [])):
        assert "`test_rows`" in reasons[flag]
    assert not named or reasons["--dataset_name"] == reasons["--dataset_config"] == "it has no effect with --datasets."


def test_an_empty_mixture_of_trl_leaves_the_named_data_set(migrated: Migrate, tmp_path: Path):
    (tmp_path / "c.yaml").write_text("datasets: []\neval_strategy: steps\n")
    sources = at(migrated(f"trl sft {TRL} --config c.yaml"), "sft.data.sources")
    assert [source["path"] for source in sources] == ["acme/rows", "acme/rows"]


def test_files_of_a_mixture_are_those_of_its_split(migrated: Migrate, tmp_path: Path):
    (tmp_path / "c.yaml").write_text(
        "datasets:\n  - {path: json, data_files: {train: [a.jsonl, b.jsonl], test: t.jsonl}}\n"
        "  - {path: json, data_files: {train: c.jsonl, extra: d.jsonl}, split: 'extra[:10%]'}\n"
    )
    sources = at(migrated("trl sft --config c.yaml"), "sft.data.sources")
    assert [source["path"] for source in sources] == ["a.jsonl", "b.jsonl", "d.jsonl"]
    (tmp_path / "c.yaml").write_text("datasets: [{path: json, data_files: {test: t.jsonl}}]\n")
    without = {item.flag: item.why for item in migrated("trl sft --config c.yaml").without}
    assert without["--datasets"] == "`data_files` has no split train."


@pytest.mark.parametrize("dataset", ["{name: main}", "{path: ''}", "{path: null, data_files: []}"])
def test_a_data_set_of_a_mixture_needs_a_path(dataset: str, migrated: Migrate, tmp_path: Path):
    (tmp_path / "c.yaml").write_text(f"datasets: [{dataset}]\n")
    without = {item.flag: item.why for item in migrated("trl sft --config c.yaml").without}
    assert without["--datasets"] == "a list of mappings is needed, each with `path`."


def test_nulls_and_odd_values_of_a_configuration_file(migrated: Migrate, tmp_path: Path):
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: acme/base\nmodel_revision: null\nfp16: false\nuse_peft: true\nlora_target_modules: null\n"
        "datasets:\n  - {path: json, data_files: [a.jsonl, b.jsonl], columns: [x]}\n"
    )
    migration = migrated("trl sft --config c.yaml")
    assert at(migration, "model") == "acme/base"
    assert at(migration, "sft.training.bf16") is True
    assert [item["path"] for item in at(migration, "sft.data.sources")] == ["a.jsonl", "b.jsonl"]
    assert any("columns of `datasets`" in item for item in migration.to_do)
    assert any("q_proj" in item for item in migration.to_do)
    (tmp_path / "c.yaml").write_text("model_name_or_path: acme/base\ndatasets: [acme/rows]\n")
    assert {item.flag: item.why for item in migrated("trl sft --config c.yaml").without}["--datasets"].startswith(
        "a list"
    )


@pytest.mark.parametrize(
    ("flags", "remarked"),
    [
        ("", True),
        ("--param_dtype", False),
        ("--param_dtype fp32", False),
        ("--param_dtype bf16", False),
        ("--bf16", False),
    ],
)
def test_the_default_precision_is_remarked_only_without_a_flag_for_it(flags: str, remarked: bool, migrated: Migrate):
    migration = migrated(f"{DPO} {flags}")
    assert any("bfloat16 by default" in sentence for sentence in migration.to_do) == remarked
    assert (at(migration, "dpo.training.bf16") is True) == ("bf16" in flags)


@pytest.mark.parametrize("flag", ["--hf_token hf_abc", "--use_wandb abc", "--wandb_key abc", "--hub_token abc"])
def test_no_secret_is_written(flag: str, migrated: Migrate):
    assert "abc" not in migrated(f"trl sft {TRL} {flag}").text()


def test_mappings_of_a_configuration_file_are_read_as_those_of_a_command(migrated: Migrate, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: acme/base\ndataset_name: acme/rows\nreward_funcs: [accuracy_reward]\n"
        "chat_template_kwargs: {enable_thinking: false}\ngeneration_kwargs: {stop: [</answer>]}\n"
    )
    migration = migrated("trl grpo --config c.yaml")
    assert at(migration, "model.chat_template_kwargs") == {"enable_thinking": False}
    assert at(migration, "rl.generation.stop") == ["</answer>"]
