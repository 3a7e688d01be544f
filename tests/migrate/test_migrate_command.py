"""``align migrate``: output, files and refusals, and two typical whole scripts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from alignment_core.recipes import load_recipe
from tests.align import align_here
from tests.conftest import fill

Align = Callable[..., subprocess.CompletedProcess[str]]
DPO = "python -m openrlhf.cli.train_dpo --pretrain acme/base --dataset mine.jsonl --beta 0.1 --learning_rate 5e-7"

DPO_SCRIPT = r"""#!/bin/bash
# Preferences of the support desk, spring
set -euo pipefail
BASE=acme/support-7b-sft
RUN="support-dpo-${VERSION:-3}"
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --pretrain $BASE --ref_pretrain $BASE \
   --dataset tickets.jsonl,acme/helpful --dataset_probs 0.8,0.2 \
   --eval_dataset held_out.jsonl --eval_steps 100 \
   --prompt_key question --chosen_key good --rejected_key bad --apply_chat_template \
   --max_len 2048 --max_samples 50000 --max_epochs 2 \
   --train_batch_size 64 --micro_train_batch_size 2 \
   --learning_rate 5e-7 --lr_warmup_ratio 0.05 --lr_scheduler cosine_with_min_lr --adam_betas 0.9 0.98 \
   --beta 0.2 --label_smoothing 0.05 --nll_loss_coef 0.1 \
   --bf16 --zero_stage 3 --adam_offload --gradient_checkpointing --packing_samples \
   --lora_rank 16 --lora_alpha 32 --attn_implementation flash_attention_2 \
   --save_path ./checkpoint/$RUN --save_steps 200 --logging_steps 5 --load_checkpoint \
   --use_wandb 0123456789abcdef --wandb_project support --wandb_run_name $RUN --seed 7
EOF
HF_HOME=/scratch/hf deepspeed --num_gpus 4 --module $training_commands 2>&1 | tee $RUN.log
"""

PPO_SCRIPT = r"""#!/bin/bash
MODEL_ARGS=(
   --pretrain acme/support-7b-sft
   --reward_pretrain acme/support-7b-rm   # trained in May
   # --remote_rm_url http://localhost:5000/get_reward
   --normalize_reward
)
DATA_ARGS=(
   --prompt_data acme/tickets --prompt_split train --input_key question --label_key reference
   --apply_chat_template --prompt_max_len 1024 --generate_max_len 1536 --max_samples 100000
)
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf", "env_vars": {"WANDB_API_KEY": "s3cret"}}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep \
   --colocate_all_models --deepspeed_enable_sleep \
   "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" \
   --rollout_batch_size 512 --micro_rollout_batch_size 8 --n_samples_per_prompt 4 --num_episodes 1 \
   --train_batch_size 256 --micro_train_batch_size 4 --max_epochs 1 \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --freezing_actor_steps 5 \
   --init_kl_coef 0.01 --kl_estimator k1 --eps_clip_low_high 0.2 0.27 --value_clip 0.2 --lambd 0.95 --gamma 1.0 \
   --temperature 0.9 --zero_stage 3 --bf16 --gradient_checkpointing --packing_samples \
   --eval_dataset acme/tickets --eval_split test --eval_n_samples_per_prompt 2 \
   --save_path ./out/ppo --ckpt_path ./out/ckpt --save_hf_ckpt --use_tensorboard ./runs
"""


@pytest.fixture
def align(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Align:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(align_here, tmp_path / "home")


def test_a_loadable_recipe_is_printed_with_the_account_of_flags(align: Align, tmp_path: Path):
    done = align("migrate", f"{DPO} --packing_samples --beta_2 0.9")
    assert done.returncode == 0
    (tmp_path / "dpo.yaml").write_text(done.stdout)
    recipe = load_recipe(tmp_path / "dpo.yaml")
    assert recipe.method == "dpo"
    assert recipe.dpo.training.learning_rate == 5e-7  # type: ignore[attr-defined]
    assert "--beta → dpo.loss.beta = 0.1" in done.stderr
    assert "--packing_samples: not needed" in done.stderr
    assert "unknown: --beta_2; did you mean --beta?" in done.stderr
    assert "# No field: --packing_samples" in done.stdout
    assert "# Unknown: --beta_2" in done.stdout


def test_an_existing_file_is_replaced_only_by_force(align: Align, tmp_path: Path):
    assert align("migrate", DPO, "-o", "dpo.yaml").returncode == 0
    written = (tmp_path / "dpo.yaml").read_text()
    refused = align("migrate", DPO.replace("0.1", "0.2"), "-o", "dpo.yaml")
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert (tmp_path / "dpo.yaml").read_text() == written
    assert align("migrate", DPO.replace("0.1", "0.2"), "-o", "dpo.yaml", "--force").returncode == 0
    assert load_recipe(tmp_path / "dpo.yaml").dpo.loss.beta == 0.2  # type: ignore[attr-defined]


def test_nothing_is_written_on_a_full_disk(align: Align, small_disk: Path):
    fill(small_disk)
    before = sorted(small_disk.iterdir())
    done = align("migrate", DPO, "-o", str(small_disk / "dpo.yaml"))
    assert done.returncode == 3
    assert "cannot be written: No space left on device" in done.stderr
    assert sorted(small_disk.iterdir()) == before


def test_a_recipe_in_another_folder_finds_the_same_rows(align: Align, tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    assert align("migrate", DPO, "-o", "recipes/dpo.yaml").returncode == 0
    recipe = load_recipe(tmp_path / "recipes" / "dpo.yaml")
    assert os.path.normpath(recipe.dpo.data.sources[0].path) == str(tmp_path / "mine.jsonl")  # type: ignore[attr-defined]


def test_every_flag_is_in_a_list_of_the_json(align: Align):
    command = f"{DPO} --zero_stage 2 --packing_samples --save_path x --lora_rnk 3"
    report = json.loads(align("migrate", command, "--json").stdout)
    assert report["status"] == "complete"
    assert report["recipe"]["dpo"]["loss"] == {"beta": 0.1}
    assert {"flag": "--beta", "field": "dpo.loss.beta", "value": 0.1, "note": ""} in report["mapped"]
    assert report["unknown"] == [{"flag": "--lora_rnk", "near": "--lora_rank"}]
    flags = {item["flag"] for part in ("mapped", "without", "unknown") for item in report[part]}
    assert {word for word in command.split() if word.startswith("--")} <= flags
    assert {"--train_batch_size", "--adam_betas"} <= {item["flag"] for item in report["defaults"]}


def test_missing_fields_are_reported_in_a_sentence(align: Align):
    done = align("migrate", "python -m openrlhf.cli.train_ppo_ray --pretrain acme/base")
    assert done.returncode == 0
    assert "to do: The recipe does not load yet: rl.rewards: is missing" in " ".join(done.stderr.split())
    report = json.loads(align("migrate", "python -m openrlhf.cli.train_ppo_ray --pretrain acme/base", "--json").stdout)
    assert report["status"] == "incomplete"
    assert any("rl.rewards" in item for item in report["to_do"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls -l"], "no command of OpenRLHF or TRL"),
        (["missing.sh"], "no command of OpenRLHF or TRL"),
        ([""], "no command of OpenRLHF or TRL"),
        (["python -m openrlhf.cli.serve_rm --reward_pretrain x"], "align serve-reward"),
        (["python -m openrlhf.cli.lora_combiner --model_path a --lora_path b"], "adapter: ADAPTER"),
        (["python -m openrlhf.cli.train_swarm --x 1"], "not a known training program"),
        (["python -m openrlhf.cli.batch_inference --eval_task rm --pretrain x"], "iterative-dpo"),
        (["trl vllm-serve --model x"], "align serve"),
        (["trl sft --config missing.yaml"], "missing.yaml"),
        ([DPO, "-o", "no/such/folder.yaml"], "no such folder"),
        ([DPO, "-o", "."], "--force"),
    ],
)
def test_unknown_commands_and_files_are_refused(align: Align, arguments: list[str], expected: str):
    done = align("migrate", *arguments)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr


def test_a_python_script_is_read_without_being_run_and_bytes_are_refused(align: Align, tmp_path: Path):
    script = "open('was-run', 'w')\nDPOTrainer('acme/base', args=DPOConfig(beta=0.2, **more), train_dataset=rows())\n"
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\x80")
    done = align("migrate", "train.py", "--json")
    migration = json.loads(done.stdout)
    assert (migration["recipe"]["model"], migration["recipe"]["dpo"]["loss"]["beta"]) == ("acme/base", 0.2)
    assert "Line 2 of train.py: `**more` of DPOConfig is not read." in migration["to_do"]
    assert migration["status"] == "incomplete", "there are no rows"
    assert not (tmp_path / "was-run").exists()
    assert "is not text" in align("migrate", "model.bin").stderr


def test_a_folder_that_takes_no_file_is_a_problem_of_the_environment(align: Align):
    done = align("migrate", DPO, "-o", "/proc/dpo.yaml")
    assert done.returncode == 3
    assert "cannot be written" in done.stderr


def test_a_command_is_read_from_standard_input(align: Align, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "in.sh").write_text(DPO_SCRIPT)
    with (tmp_path / "in.sh").open() as script:
        monkeypatch.setattr("sys.stdin", script)
        assert align("migrate", "-").returncode == 0


def test_a_script_of_train_dpo_becomes_a_recipe(align: Align, tmp_path: Path):
    (tmp_path / "train.sh").write_text(DPO_SCRIPT)
    done = align("migrate", "train.sh", "-o", "dpo.yaml", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["unknown"]) == ("complete", [])
    assert "0123456789abcdef" not in (tmp_path / "dpo.yaml").read_text() + done.stdout
    recipe = load_recipe(tmp_path / "dpo.yaml")
    section = recipe.dpo  # type: ignore[attr-defined]
    assert (recipe.name, recipe.seed, recipe.model.name) == ("support-dpo-3", 7, "acme/support-7b-sft")
    assert [(item.path.split("/")[-1], item.weight, item.held_out) for item in section.data.sources] == [
        ("tickets.jsonl", 0.8, False),
        ("helpful", 0.2, False),
        ("held_out.jsonl", None, True),
    ]
    assert all(
        item.columns == {"prompt": "question", "chosen": "good", "rejected": "bad"} for item in section.data.sources
    )
    assert (section.loss.beta, section.loss.label_smoothing, section.loss.nll_weight) == (0.2, 0.05, 0.1)
    training = section.training
    assert (training.batch_size, training.learning_rate, training.num_train_epochs, training.bf16) == (
        64,
        5e-7,
        2,
        True,
    )
    assert (training.warmup_ratio, training.min_lr_ratio, training.adam_beta2, training.eval_steps) == (
        0.05,
        0.1,
        0.98,
        100,
    )
    assert (training.lora.r, training.lora.lora_alpha) == (16, 32)
    assert (recipe.resources.zero_stage, recipe.resources.offload_optimizer, recipe.resources.trainers) == (3, True, 4)
    assert recipe.tracking.wandb is not None
    assert recipe.tracking.wandb.project == "support"
    why = {item["flag"]: item["why"] for item in report["without"]}
    assert {
        "--ref_pretrain",
        "--save_path",
        "--load_checkpoint",
        "HF_HOME",
        "deepspeed --num_gpus --module",
    } <= why.keys()


def test_a_script_of_train_ppo_ray_becomes_a_recipe(align: Align, tmp_path: Path):
    (tmp_path / "train.sh").write_text(PPO_SCRIPT)
    done = align("migrate", "train.sh", "-o", "ppo.yaml", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["unknown"]) == ("complete", [])
    assert "s3cret" not in (tmp_path / "ppo.yaml").read_text() + done.stdout
    recipe = load_recipe(tmp_path / "ppo.yaml")
    rl = recipe.rl  # type: ignore[attr-defined]
    assert (rl.steps, rl.prompts_per_step, rl.generation.num_generations) == (196, 512, 4)  # 100,000 ÷ 512, rounded up
    assert (rl.prompts.max_prompt_length, rl.generation.max_completion_length) == (1024, 1536)
    assert (rl.advantage.estimator, rl.advantage.gae_lambda, rl.advantage.whiten) == ("gae", 0.95, "mean-and-deviation")
    assert (rl.critic.learning_rate, rl.critic.value_clip, rl.critic.freezing_steps) == (9e-6, 0.2, 5)
    assert (rl.kl.coefficient, rl.kl.place, rl.kl.estimator) == (0.01, "reward", "k1")
    assert (rl.loss.epsilon, rl.loss.epsilon_high, rl.training.batch_size) == (0.2, 0.27, 256)
    assert (rl.rewards[0].reward_model.name, rl.rewards[0].normalise) == ("acme/support-7b-rm", "model")
    assert rl.prompts.sources[0].columns == {"prompt": "question", "label": "reference"}
    assert recipe.evaluation is not None
    assert recipe.evaluation.prompts.sources[0].split == "test"
    assert (recipe.resources.engines, recipe.resources.tensor_parallel_size, recipe.resources.trainers) == (4, 2, 8)
