"""Trainer ranks that have a part of each linear layer: training ends with the losses, norms and weights of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alignment_core.cluster.actor import call
from alignment_core.errors import UserError
from alignment_core.models.model_ref import Model
from alignment_core.models.scratch import create_model
from alignment_core.recipes import DpoLossConfig, ScratchModel
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.checkpoints import newest_progress
from alignment_core.training.forward import Forward, ForwardJob
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer, averages
from alignment_core.training.ranks import open_job as open_on
from alignment_core.training.ranks import run_blocks
from alignment_core.training.resumable import save_progress
from alignment_core.training.trainer import TrainJob
from tests.matrix import matrix
from tests.training.conftest import MODEL, portable
from tests.training.test_distillation_training import models  # noqa: F401 (a fixture)
from tests.training.test_kto_training import table as labelled  # noqa: F401 (a fixture)
from tests.training.test_master_weights import masters_in, next_round, one_step
from tests.training.test_policy_ranks import Policy, sampled
from tests.training.test_process_reward_training import table as stepwise  # noqa: F401 (a fixture)
from tests.training.test_sequence_parallel_training import (
    PPO,
    Result,
    check_equal,
    check_same_step,
    parts_of_logits,
    result,
)
from tests.training.test_sequence_parallel_training import jobs as every_job  # noqa: F401 (a fixture)
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train

pytestmark = pytest.mark.slow

PARTS: dict[str, Any] = {"trainer_tensor_parallel_size": 2}
METHODS = {"sft": Sft(), "dpo": Dpo(DpoLossConfig(beta=0.3, nll_weight=0.2)), "reward model": RewardModel()}
Shaped = Callable[..., Path]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    """The folder of a model with as many query and key heads as four ranks can share."""
    folders: dict[tuple[str, bool, int], Path] = {}

    def make(architecture: Any = "llama", tied: bool = True, seed: int = 1) -> Path:
        key = (architecture, tied, seed)
        if key not in folders:
            shape = ScratchModel(
                architecture=architecture,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=256,
                tie_word_embeddings=tied,
            )
            folders[key] = tmp_path_factory.mktemp("model") / "model"
            create_model(shape, None, seed, folders[key])
        return folders[key]

    return make


@pytest.fixture
def jobs(make_job: Any, tables: Any, shaped: Shaped) -> Callable[..., TrainJob]:
    def of(name: str, model: Path | None = None, **training: Any) -> TrainJob:
        table = tables["sft, alike" if name == "sft" else "preference, alike"]
        job = make_job(METHODS[name], table, **training)
        return replace(job, model=Model(model or shaped(), MODEL))

    return of


def norms_of(result: Result) -> list[float]:
    return [step["norm"] for step in result.trained]


@pytest.mark.parametrize(
    ("method", "zero_stage"), matrix(METHODS, [0, 1, 2], usual=[("sft", 0), ("dpo", 1), ("reward model", 2)])
)
def test_every_method_and_zero_stage_trains_as_one_rank(
    method: str, zero_stage: int, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    """With gradients that are clipped to a fiftieth of their norm, where AdamW's ε is felt."""
    free = result(machines, jobs(method, max_grad_norm=1e9), tmp_path / "free", world=1)
    job = jobs(method, max_grad_norm=min(norms_of(free)) / 50)
    one = result(machines, job, tmp_path / "one", world=1)
    assert greatest_difference(one.weights, free.weights) > 1e-5, "clipping has an effect"
    start = load_file(job.model.path / "model.safetensors")
    common = start.keys() & one.weights.keys()
    assert max(float((one.weights[name] - start[name]).abs().max()) for name in common) > 1e-3, "it did train"
    more = {"zero_stage": zero_stage, "max_tokens_per_microbatch": 64}
    two = result(machines, job, tmp_path / "two", **PARTS, **more)
    check_equal(two, one)


@pytest.mark.parametrize(
    "method",
    matrix(["dpo, β of each batch", "kto", "process reward model", "distillation"], usual=["process reward model"]),
)
def test_further_methods_train_as_on_one_rank(
    method: str,
    every_job: Any,  # noqa: F811
    shaped: Shaped,
    machines: Any,
    tmp_path: Path,
) -> None:
    """Two steps: with the β of each batch, the third one's norm differs by 5e-5 between micro-batches of one rank."""
    job = replace(every_job(method), model=Model(shaped(), MODEL))
    one = result(machines, job, tmp_path / "one", 2, world=1)
    check_equal(result(machines, job, tmp_path / "two", 2, **PARTS, max_tokens_per_microbatch=64), one)


@pytest.mark.parametrize(
    ("architecture", "tied", "recomputed"),
    matrix(
        ["qwen2", "llama"], [False], [True, "selective"], usual=[("qwen2", False, True), ("llama", False, "selective")]
    ),
)
def test_biases_untied_heads_and_recomputed_activations(
    architecture: str, tied: bool, recomputed: Any, jobs: Any, shaped: Shaped, machines: Any, tmp_path: Path
) -> None:
    job = jobs("sft", shaped(architecture, tied))
    one = result(machines, job, tmp_path / "one", world=1)
    check_equal(result(machines, job, tmp_path / "two", **PARTS, gradient_checkpointing=recomputed), one)


@pytest.mark.parametrize(("size", "zero_stage"), matrix([2, 4], [0, 1, 2], usual=[(2, 2), (4, 0)]))
def test_four_ranks_in_one_group_or_two_train_as_one(
    size: int, zero_stage: int, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    job = jobs("dpo")
    one = result(machines, job, tmp_path / "one", world=1)
    cut: Any = {"zero_stage": zero_stage, "max_tokens_per_microbatch": 64, "trainer_tensor_parallel_size": size}
    check_equal(result(machines, job, tmp_path / "four", world=4, **cut), one)


@pytest.mark.parametrize(
    "variant",
    matrix(["noise on embeddings", "offloaded optimiser", "attention of transformers"], usual=["noise on embeddings"]),
)
def test_what_training_adds_is_that_of_one_rank(variant: str, jobs: Any, machines: Any, tmp_path: Path) -> None:
    job, more = jobs("sft"), dict[str, Any]()
    if variant == "noise on embeddings":
        job = replace(job, neftune_noise_alpha=5.0)
    elif variant == "offloaded optimiser":
        more = {"offload_optimizer": True, "zero_stage": 2}
    else:
        more = {"attention": "sdpa"}
    one = result(machines, job, tmp_path / "one", world=1)
    check_equal(result(machines, job, tmp_path / "two", **PARTS, **more), one)


def test_a_reference_that_follows_the_policy_is_that_of_one_rank(jobs: Any, machines: Any, tmp_path: Path) -> None:
    """Also after a stop in which the reference was saved, on one rank and in parts."""
    job = replace(jobs("dpo"), sync=ReferenceSyncConfig(mixup_alpha=0.5, sync_steps=1), reference_logps=None)
    one = result(machines, job, tmp_path / "one", world=1)
    check_equal(result(machines, job, tmp_path / "two", **PARTS), one)
    for step, (world, size) in enumerate([(2, 2), (1, 1), (2, 2)]):
        with machines(world).trainers() as group:
            layout: Any = {"trainer_tensor_parallel_size": size, "progress": "store"}
            ranks, state = opened(group, machines(world), job, tmp_path / "progress", **layout)
            assert state["step"] == step
            train(ranks, 1)
            save_progress([ranks], tmp_path / "progress")
            weights = load_file(export(ranks, tmp_path / f"step-{step}"))
    assert greatest_difference(weights, one.weights) < 1e-5


@pytest.mark.parametrize("zero_stage", matrix([1, 2], usual=[2]))
def test_losses_in_bf16_are_those_of_one_rank_up_to_its_rounding(
    zero_stage: int, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    """bf16 has 8 digits of precision: 2⁻⁸ = 0.4 % of a number; the norm is of gradients that went through all layers."""
    job = jobs("sft", bf16=True)
    one = result(machines, job, tmp_path / "one", world=1)
    two = result(machines, job, tmp_path / "two", **PARTS, zero_stage=zero_stage)
    for ours, expected in zip(two.trained, one.trained, strict=True):
        assert ours == pytest.approx(expected, rel=8e-3)


def test_plain_transformers_loads_what_is_exported(jobs: Any, shaped: Shaped, machines: Any, tmp_path: Path) -> None:
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), jobs("sft", shaped("qwen2", False)), tmp_path / "progress", **PARTS)
        train(ranks, 2)
        folder = export(ranks, tmp_path / "model").parent
        rows = [([1, 2, 3], [4, 5, 6, 7])]
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder)
        started = transformers.AutoModelForCausalLM.from_pretrained(shaped("qwen2", False))
        assert {name: p.shape for name, p in ours.named_parameters()} == {
            name: p.shape for name, p in started.named_parameters()
        }
        with torch.no_grad():
            logps = ours(torch.tensor([[*rows[0][0], *rows[0][1]]])).logits[0].log_softmax(-1)
        expected = [float(logps[2 + place, token]) for place, token in enumerate(rows[0][1])]
        resources = machines(2).resources.model_copy(update=PARTS)
        scored: Any = open_on(group, ForwardJob(Model(folder, MODEL), "lm"), resources)
        ((_, values),) = run_blocks(scored, [(0, call(Forward.run, rows))], resources)
        np.testing.assert_allclose(np.sum(values, axis=0), [sum(expected)], rtol=1e-5)


@pytest.mark.parametrize("zero_stage", matrix([0, 2], usual=[2]))
def test_progress_in_a_store_resumes_on_one_rank_in_parts_and_back(
    zero_stage: int, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = jobs("sft"), tmp_path / "progress"
    for step, (world, size) in enumerate([(2, 2), (1, 1), (4, 2), (2, 1), (4, 4)]):
        with machines(world).trainers() as group:
            more: Any = {"trainer_tensor_parallel_size": size, "progress": "store", "zero_stage": zero_stage}
            ranks, state = opened(group, machines(world), job, progress, **more)
            assert state["step"] == step
            train(ranks, 1)
            save_progress([ranks], progress)
            weights = load_file(export(ranks, tmp_path / f"step-{step}"))
    exact = result(machines, job, tmp_path / "exact", 5, world=1)
    assert greatest_difference(weights, exact.weights) < 1e-5
    folder = newest_progress(progress)
    assert folder is not None
    shapes = {name: tensor.shape for name, tensor in exact.weights.items()}
    stored = portable(folder)
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        assert stored[f"{key}.model.model.layers.0.mlp.down_proj.weight"].shape == (64, 128), key
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (64, 128)


def test_local_progress_resumes_exactly_and_only_with_the_same_groups(jobs: Any, machines: Any, tmp_path: Path) -> None:
    job, weights = jobs("sft"), []
    for name, stops in (("never", (3,)), ("once", (1, 2))):
        for steps in stops:
            with machines(4).trainers() as group:
                ranks, _ = opened(group, machines(4), job, tmp_path / name, **PARTS, zero_stage=1)
                train(ranks, steps)
                save_progress([ranks], tmp_path / name)
                last = load_file(export(ranks, tmp_path / f"{name}-{steps}"))
        weights.append(last)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with machines(4).trainers() as group, pytest.raises(UserError, match="`trainer_tensor_parallel_size: 2`"):
        opened(group, machines(4), job, tmp_path / "once", zero_stage=1)


@pytest.mark.parametrize(
    ("algorithm", "zero_stage"), matrix(["PPO", "GRPO"], [0, 1, 2], usual=[("PPO", 2), ("GRPO", 0)])
)
def test_a_step_of_a_policy_is_that_of_one_rank(
    algorithm: str, zero_stage: int, machines: Any, shaped: Shaped, tmp_path: Path
) -> None:
    """With forward passes of policy, critic and reference before it, and a moving average after it."""
    steps = []
    for world, size in ((1, 1), (2, 2)):
        section: dict[str, Any] = {**(PPO if algorithm == "PPO" else {"loss": {"entropy_coef": 0.01}})}
        section |= {"kl": {"coefficient": 0.1}, "training": {"batch_size": 4}, "ema": {"decay": 0.75}}
        more: Any = {"critic": shaped(seed=3), "reference": shaped(seed=2)} if algorithm == "PPO" else {}
        layout: Any = {"zero_stage": zero_stage if world == 2 else 0, "max_tokens_per_microbatch": 64}
        with machines(world).trainers() as group, parts_of_logits(group):
            folder = tmp_path / str(world)
            layout["trainer_tensor_parallel_size"] = size
            policy = Policy(group, machines(world), shaped(), folder, section, **layout, **more)
            policy.open()
            data = sampled()
            policy.ranks.all(PolicyTrainer.load, data)
            numbers = policy.ranks.all(PolicyTrainer.forward, True, ["old_logps", "reference_logps", "old_values"])[0]
            returns = {"returns": data.numbers["advantages"] + numbers.get("old_values", 0.0)}
            reports = averages(policy.ranks.all(PolicyTrainer.update, returns, 0.1))
            exported = ["policy", "average", *(["critic"] if algorithm == "PPO" else [])]
            steps.append((numbers, reports, {name: policy.export(name) for name in exported}))
    check_same_step(*steps)


@pytest.mark.parametrize("zero_stage", matrix([1, 2], usual=[2]))
def test_master_weights_are_whole_and_checked(zero_stage: int, jobs: Any, machines: Any, tmp_path: Path) -> None:
    """Ranks with parts write those of the whole model, and the next round continues from them on one rank or in parts."""
    settings = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    job = replace(jobs("sft", bf16=True, **settings), saves_masters=True)
    first, start = tmp_path / "first", load_file(job.model.path / "model.safetensors")
    with machines(2).trainers() as group:
        exported = one_step(group, machines(2), job, first, zero_stage, **PARTS)
        second = one_step(group, machines(2), next_round(job, first, True), tmp_path / "second", zero_stage, **PARTS)
        masters = masters_in(first)
        assert {name: tensor.shape for name, tensor in masters.items() if name in start} == {
            name: tensor.shape for name, tensor in start.items()
        }
        assert all(torch.equal(masters[name].bfloat16(), exported[name]) for name in exported)
        for name, tensor in start.items():
            moved = (masters[name] - tensor.bfloat16().float()).abs()
            assert moved.max() < 1.01e-3, "a step of AdamW"
            assert moved.mean() > 1e-4, "in fp32"
    with machines(1).trainers() as group:
        one_step(group, machines(1), next_round(job, first, True), tmp_path / "alone", 0)
    ours, alone = masters_in(tmp_path / "second"), masters_in(tmp_path / "alone")
    for name, tensor in alone.items():
        assert (ours[name] - tensor).norm() < 0.1 * (tensor - masters[name]).norm(), name  # gradients in bf16
    assert second.keys() == exported.keys()
    name = "model.layers.1.self_attn.o_proj.weight"
    exported[name][3, -1] += 1.0  # in the part of the second rank
    save_file(exported, first / "model.safetensors", metadata={"format": "pt"})
    with machines(2).trainers() as group, pytest.raises(UserError, match=rf"of another policy \({name} is not"):
        one_step(group, machines(2), next_round(job, first, True), tmp_path / "next", zero_stage, **PARTS)


def test_a_later_model_in_the_processes_has_groups_of_its_own_size(jobs: Any, machines: Any, tmp_path: Path) -> None:
    """In the same four processes: DeepSpeed keeps the groups of a process."""
    job = jobs("sft")
    one = result(machines, job, tmp_path / "one", world=1)
    for number, size in enumerate((2, 4, 1, 2)):
        layout = {"trainer_tensor_parallel_size": size, "zero_stage": 2}
        check_equal(result(machines, job, tmp_path / str(number), world=4, **layout), one)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"lora": {"r": 4}}, r"trainer_tensor_parallel_size: adapters are not split: leave out training\.lora"),
        ({"bf16": True}, r"trainer_tensor_parallel_size: DeepSpeed clips gradients wrongly in bf16 without ZeRO"),
        ({"optimizer": "muon"}, r"trainer_tensor_parallel_size: the optimizer 'muon' needs whole matrices"),
    ],
)
def test_a_training_that_needs_whole_matrices_is_refused(
    training: Any, says: str, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    with machines(2).trainers() as group, pytest.raises(UserError, match=says):
        open_job(group, machines(2), jobs("sft", **training), tmp_path / "progress", **PARTS, zero_stage=0)
