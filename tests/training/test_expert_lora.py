"""LoRA on the fused experts of a mixture, on real DeepSpeed ranks: the steps of peft, for any layout of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.canonical import derive_seed
from alignment_core.models.adapters import add_adapters
from alignment_core.models.model_ref import Model
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer
from alignment_core.training.resumable import save_progress
from tests.matrix import cases
from tests.training.conftest import MODEL
from tests.training.test_lora import loss_of_step
from tests.training.test_policy_ranks import Policy, sampled
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained

pytestmark = pytest.mark.slow

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_parameters": EXPERTS}
PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}}
"""Options of ZeRO 3 by which it splits parameters of any size."""
Mixture = Callable[[str], Path]


@pytest.fixture
def make_mixture_job(make_job: Any, mixture_model: Mixture) -> Any:
    """A job on Qwen3-MoE with adapters; without the load-balancing loss, which depends on the micro-batches."""

    def make(method: Any, **training: Any) -> Any:
        job = make_job(method, **{"lora": LORA, "router_aux_loss_coef": 0.0, **training})
        return replace(job, model=Model(mixture_model("qwen3_moe"), MODEL))

    return make


def steps_of_peft(job: Any, table: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint after two steps of fine-tuning by peft and torch alone, row by row, merged by ``merge_and_unload``."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(job.model.path)
    started = transformers.AutoModelForCausalLM.from_pretrained(job.model.path)
    seed = derive_seed(job.seed, "adapters")
    add_adapters(started, started.lm_head, job.training.lora, seed, train_head=False)
    initial = {f"base_model.model.{name}": weight for name, weight in started.named_parameters() if "lora_" in name}
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=EXPERTS
    )
    model: Any = peft.get_peft_model(plain, config)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert weights.keys() == initial.keys()
    assert len([name for name in weights if ".experts." in name]) == 2 * 2 * 2, (
        "A and B of two parameters in two blocks"
    )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(initial[name])
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, eps=1e-5, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of_step(job, table, step, lambda ids: model(ids).logits).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    model.merge_and_unload().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_steps_equal_those_of_peft(make_mixture_job: Any, machines: Any, tables: Any, tmp_path: Path) -> None:
    job = make_mixture_job(Sft(), lr_scheduler_type="constant", weight_decay=0.1)
    before = load_file(job.model.path / "model.safetensors")
    expected = steps_of_peft(job, tables["sft"], tmp_path / "peft")
    weights = trained(machines(1), job, tmp_path / "one", steps=2)
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in before if not weights[name].equal(before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    of_experts = [name for name in before if ".experts." in name]
    assert max(float((weights[name] - before[name]).abs().max()) for name in of_experts) > 1e-3
    assert greatest_difference(weights, expected) < 1e-6


@pytest.mark.parametrize("method", [Sft(), RewardModel()], ids=["sft", "reward model"])
def test_ranks_sharding_and_micro_batches_do_not_change_the_result(
    method: Any, make_mixture_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_mixture_job(method)
    single = trained(machines(1), job, tmp_path / "one")
    before = load_file(job.model.path / "model.safetensors")
    moved = [float((single[name] - before[name]).abs().max()) for name in before if ".experts." in name]
    assert max(moved) > 1e-4
    for stage in (0, 1, 2, 3):
        both = trained(
            machines(2),
            job,
            tmp_path / f"both-{stage}",
            zero_stage=stage,
            max_tokens_per_microbatch=[32, 4096][stage % 2],
            deepspeed=PARTITIONED if stage == 3 else {},
        )
        assert greatest_difference(single, both) < 1e-5
    checkpointed = trained(machines(1), job, tmp_path / "checkpointed", gradient_checkpointing=True)
    assert greatest_difference(single, checkpointed) < 1e-5


@pytest.mark.parametrize(
    ("zero_stage", "bf16", "progress_in"),
    cases(
        [(0, False, "local"), (1, False, "store"), (2, True, "local"), (3, False, "local"), (3, True, "local")],
        usual=[(1, False, "store"), (3, True, "local")],
    ),
)
def test_a_resumed_job_ends_in_the_same_bytes(
    zero_stage: int, bf16: bool, progress_in: str, make_mixture_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = make_mixture_job(Sft(), bf16=bf16), tmp_path / "progress"
    split = PARTITIONED if zero_stage == 3 else {}
    resources = {"zero_stage": zero_stage, "progress": progress_in, "deepspeed": split}
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress, **resources)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(2), job, progress, **resources)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


def test_a_dense_critic_has_adapters_beside_a_mixture(
    machines: Any, mixture_model: Mixture, tiny_model: Any, tmp_path: Path
) -> None:
    """It has neither experts to adapt nor routers to balance, as a critic from a dense reward model."""
    training = {"lora": LORA | {"target_modules": []}, "router_aux_loss_coef": 0.01}
    section = {"training": training, "advantage": {"estimator": "gae"}, "critic": {"learning_rate": 1e-3}}
    data = sampled()
    data.numbers.update(dict.fromkeys(("returns", "old_values"), data.numbers["advantages"]))
    with machines(1).trainers() as group:
        policy = Policy(group, machines(1), mixture_model("qwen3_moe"), tmp_path / "run", section, critic=tiny_model())
        policy.open()
        before = policy.export("critic")
        (reports,) = policy.learn(data)
        after = policy.export("critic")
    assert ("aux_loss" in reports["policy"].sums, "aux_loss" in reports["critic"].sums) == (True, False)
    moved = {name.rpartition(".")[0].rpartition(".")[2] for name in before if not after[name].equal(before[name])}
    assert moved >= {"q_proj", "down_proj", "score"}, "all linear layers, as it has none of the names"


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_reference_is_the_policy_without_its_adapters(
    zero_stage: int, machines: Any, mixture_model: Mixture, tmp_path: Path
) -> None:
    data, logps = sampled(), {}
    for lora in (None, LORA | {"lora_alpha": 64}):
        training = {"lora": lora, "router_aux_loss_coef": 0.0}
        with machines(2).trainers() as group:
            section = {"kl": {"coefficient": 0.1}, "training": training}
            folder = tmp_path / str(bool(lora))
            split = PARTITIONED if zero_stage == 3 else {}
            resources: dict[str, Any] = {"zero_stage": zero_stage, "deepspeed": split}
            policy = Policy(group, machines(2), mixture_model("mixtral"), folder, section, **resources)
            policy.open()
            for _ in range(2):
                policy.logps(data)
                policy.ranks.all(PolicyTrainer.update, {}, 0.1)
            logps[bool(lora)] = policy.logps(data)
    copy, own = logps[False]["reference_logps"], logps[True]["reference_logps"]
    np.testing.assert_array_equal(own, copy)
    moved = np.split(abs(logps[True]["old_logps"] - copy), data.starts_K[1:-1])
    assert min(difference.max() for difference in moved) > 1e-3, "the policy itself has moved"
