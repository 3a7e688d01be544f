"""LoRA on a policy in bf16 keeps fp32 master weights: those of the initial policy with the adapters merged in.

By hand they are W + 2 B A (lora_alpha / r = 8 / 4), with the A and B of the output `adapter`. A step of AdamW at 1e-5 makes B
about 1e-5, so that 2 B A is far below 2⁻⁹ of nearly all weights, which is what bf16 rounds away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from alignment_core.errors import UserError
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import TrainingConfig
from alignment_core.training.methods.sft import Sft
from alignment_core.training.rank_folders import write
from alignment_core.training.trainer import Trainer, TrainJob
from tests.matrix import cases
from tests.training.conftest import MODEL
from tests.training.test_expert_lora import PARTITIONED
from tests.training.test_master_weights import NORM, RATE, masters_in, next_round, one_step
from tests.training.test_trainer_ranks import open_job, train

pytestmark = pytest.mark.slow

LORA = {"r": 4, "lora_alpha": 8}
SMALL = {"bf16": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant"}
LARGE = {"bf16": True, "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_epsilon": 1e-15}
LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    *((1, 0, {}), (2, 0, {}), (2, 1, {}), (2, 2, {}), (2, 3, {})),
    (2, 3, {"deepspeed": PARTITIONED, "offload_optimizer": True}),
]
Weights = dict[str, torch.Tensor]


def with_masters(job: TrainJob) -> TrainJob:
    return dataclasses.replace(job, saves_masters=True)


def in_bf16(folder: Path) -> Weights:
    """A policy's weights as training in bf16 reads them, in fp32."""
    return {name: weight.bfloat16().float() for name, weight in load_file(folder / "model.safetensors").items()}


def products(folder: Path) -> Weights:
    """B A of each adapted weight, by its name."""
    parts = load_file(folder / ADAPTER / "adapter_model.safetensors")
    prefix, suffix = "base_model.model.", ".lora_A.weight"
    layers = [name.removesuffix(suffix) for name in parts if name.endswith(suffix)]
    return {
        f"{layer.removeprefix(prefix)}.weight": parts[f"{layer}.lora_B.weight"].float()
        @ parts[f"{layer}{suffix}"].float()
        for layer in layers
    }


def assert_close(weights: Weights, expected: Weights) -> None:
    """Equal up to the rounding of fp32: 2⁻²³ of a weight, and some of sums of four products."""
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=2**-22, atol=1e-11, msg=name)


@pytest.mark.parametrize(("trainers", "zero_stage", "resources"), cases(LAYOUTS, usual=[LAYOUTS[3], LAYOUTS[5]]))
def test_two_rounds_below_the_precision_of_bf16_add_up(
    trainers: int, zero_stage: int, resources: dict[str, Any], make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = with_masters(make_job(Sft(), lora=LORA, **SMALL))
    first, second, alone = (tmp_path / name for name in ("first", "second", "alone"))
    policies = {}
    with machines(trainers).trainers() as group:
        for folder, of_round in (
            (first, job),
            (second, next_round(job, first, masters=True)),
            (alone, next_round(job, first, masters=False)),
        ):
            policies[folder] = one_step(group, machines(trainers), of_round, folder, zero_stage, **resources)
        ranks = open_job(
            group, machines(trainers), next_round(job, first, masters=True), tmp_path / "again", zero_stage=zero_stage
        )
        train(ranks, 1)
        write(ranks, [tmp_path / "last"], Trainer.export, tmp_path / "last", False)
    start = in_bf16(job.model.path)
    changes = products(first), products(second)
    assert len(changes[0]) == 14, "seven layers in each of two blocks"
    expected = {name: weight.clone() for name, weight in start.items()}
    for number, folder in enumerate((first, second)):
        expected |= {name: expected[name] + 2.0 * change for name, change in changes[number].items()}
        assert_close(masters_in(folder), expected)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        masters = masters_in(folder)
        assert {name for name, _ in loaded.named_parameters()} == masters.keys()
        for name, weight in loaded.named_parameters():
            assert torch.equal(weight, masters[name].bfloat16()), name
    checkpoint = load_file(tmp_path / "last" / "model.safetensors")
    assert all(torch.equal(checkpoint[name], weight) for name, weight in policies[second].items()), "without masters"
    assert not [path for path in (tmp_path / "last").iterdir() if path.is_dir()]
    for name, change in changes[0].items():
        assert (change != 0).all()
        lost = policies[first][name].float() == start[name]
        assert lost.float().mean() > 0.9, "the first round, without its master weights"
        begins_anew = masters_in(alone)[name] - 2.0 * products(alone)[name] - start[name]
        assert float(begins_anew[lost].abs().max()) < 1e-8


def test_the_number_of_ranks_and_the_zero_stage_do_not_change_master_weights(
    make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = with_masters(make_job(Sft(), lora=LORA, bf16=True, learning_rate=1e-3))
    start, of_layout = in_bf16(job.model.path), {}
    for number, (trainers, zero_stage, resources) in enumerate(LAYOUTS):
        with machines(trainers).trainers() as group:
            one_step(group, machines(trainers), job, tmp_path / str(number), zero_stage, **resources)
        of_layout[number] = masters_in(tmp_path / str(number))
    single = of_layout[0]
    for layout, masters in of_layout.items():
        assert masters.keys() == single.keys(), layout
        for name in products(tmp_path / "0"):
            moved = (single[name] - start[name]).norm()
            assert (masters[name] - single[name]).norm() < 0.05 * moved, (layout, name)  # gradients in bf16
        same = masters.keys() - products(tmp_path / "0").keys()
        assert all(torch.equal(masters[name], start[name]) for name in same)


@pytest.mark.parametrize(("trainers", "zero_stage"), cases([(1, 0), (2, 2), (2, 3)], usual=[(2, 3)]))
@pytest.mark.parametrize("tied", [True, False])
def test_training_all_weights_and_adapters_continue_from_each_other(
    tied: bool, trainers: int, zero_stage: int, make_job: Any, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Norm weights: 1 → 1 ± 1.5e-3 with all weights, which rounds to 1, the same beside adapters, then 1 ± 3e-3 or 1."""
    start = Model(tiny_model(tied=tied), MODEL)
    all_weights = dataclasses.replace(with_masters(make_job(Sft(), **LARGE)), model=start)
    with_adapters = dataclasses.replace(with_masters(make_job(Sft(), lora=LORA, **SMALL)), model=start)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with machines(trainers).trainers() as group:
        one_step(group, machines(trainers), all_weights, first, zero_stage)
        one_step(group, machines(trainers), next_round(with_adapters, first, masters=True), second, zero_stage)
        rounded = one_step(group, machines(trainers), next_round(all_weights, second, masters=True), third, zero_stage)
    before, between, after = (masters_in(folder) for folder in (first, second, third))
    expected = before | {name: before[name] + 2.0 * change for name, change in products(second).items()}
    assert_close(between, expected)
    policy = load_file(second / "model.safetensors")
    assert all(torch.equal(weight, between[name].bfloat16()) for name, weight in policy.items())
    assert torch.equal(policy[NORM], torch.ones_like(policy[NORM]))
    assert torch.equal(between[NORM], before[NORM])
    assert (after[NORM] - between[NORM]).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    down = after[NORM] < 1 - 1.9 * RATE
    assert down.any()
    assert torch.equal(rounded[NORM], torch.where(down, 1 - 2**-8, 1.0).bfloat16())


@pytest.mark.parametrize(("trainers", "zero_stage", "resources"), cases([LAYOUTS[0], *LAYOUTS[3:]], usual=LAYOUTS[4:5]))
def test_modules_that_are_trained_whole_have_the_master_weights_of_the_optimiser(
    trainers: int, zero_stage: int, resources: dict[str, Any], make_job: Any, machines: Any, tmp_path: Path
) -> None:
    whole = LORA | {"modules_to_save": ["model.norm", "embed_tokens"]}
    job = with_masters(make_job(Sft(), lora=whole, **LARGE))
    first, second = tmp_path / "first", tmp_path / "second"
    with machines(trainers).trainers() as group:
        once = one_step(group, machines(trainers), job, first, zero_stage, **resources)
        following = next_round(job, first, masters=True)
        twice = one_step(group, machines(trainers), following, second, zero_stage, **resources)
    masters = masters_in(first), masters_in(second)
    assert torch.equal(once[NORM], torch.ones_like(once[NORM]))
    assert (masters[0][NORM] - 1).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    assert (masters[1][NORM] - masters[0][NORM]).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    down = masters[1][NORM] < 1 - 1.9 * RATE
    assert down.any()
    assert torch.equal(twice[NORM], torch.where(down, 1 - 2**-8, 1.0).bfloat16())
    for weights, of_round in zip((once, twice), masters, strict=True):
        assert all(torch.equal(of_round[name].bfloat16(), weight) for name, weight in weights.items())


def test_dora_scales_the_rows_of_the_master_weights(make_job: Any, machines: Any, tmp_path: Path) -> None:
    """m (W + 2 B A) / ‖W + 2 B A‖, by row: equation 5 of the paper."""
    job = with_masters(make_job(Sft(), lora=LORA | {"use_dora": True}, **SMALL))
    first, second = tmp_path / "first", tmp_path / "second"
    with machines(1).trainers() as group:
        one_step(group, machines(1), job, first, 0)
        policy = one_step(group, machines(1), next_round(job, first, masters=True), second, 0)
    expected = masters_in(first)
    lengths = load_file(second / ADAPTER / "adapter_model.safetensors")
    for name, change in products(second).items():
        whole = expected[name] + 2.0 * change
        length = lengths[f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"].float()
        expected[name] = length[:, None] * whole / whole.norm(dim=1, keepdim=True)
    masters = masters_in(second)
    for name, weight in masters.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9, msg=name)
    assert all(torch.equal(masters[name].bfloat16(), weight) for name, weight in policy.items())


@pytest.mark.parametrize(("trainers", "zero_stage"), cases([(1, 0), (2, 3)], usual=[(2, 3)]))
def test_master_weights_of_experts_are_those_of_peft(
    trainers: int, zero_stage: int, make_job: Any, machines: Any, mixture_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two rounds, of which `peft` merges the adapters into one model in fp32."""
    experts = LORA | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    job = make_job(Sft(), lora=experts, router_aux_loss_coef=0.0, **SMALL)
    job = dataclasses.replace(with_masters(job), model=Model(mixture_model("qwen3_moe"), MODEL))
    first, second = tmp_path / "first", tmp_path / "second"
    with machines(trainers).trainers() as group:
        one_step(group, machines(trainers), job, first, zero_stage)
        one_step(group, machines(trainers), next_round(job, first, masters=True), second, zero_stage)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.bfloat16).float()
    for folder in (first, second):
        model = peft.PeftModel.from_pretrained(model, folder / ADAPTER).merge_and_unload()
        expected = dict(model.named_parameters())
        masters = masters_in(folder)
        assert masters.keys() == expected.keys()
        for name, weight in masters.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(("trainers", "zero_stage"), cases([(1, 0), (2, 2), (2, 3)], usual=[(2, 2)]))
def test_master_weights_of_another_policy_are_refused_though_adapters_leave_its_weights_alone(
    trainers: int, zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = with_masters(make_job(Sft(), lora=LORA, **SMALL))
    layer = "model.layers.1.self_attn.q_proj.weight"
    with machines(trainers).trainers() as group:
        weights = one_step(group, machines(trainers), job, tmp_path / "first", zero_stage)
        for name in (NORM, layer):
            changed = weights | {name: weights[name].clone()}
            changed[name].view(-1)[3] += 1
            save_file(changed, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
            following = next_round(job, tmp_path / "first", masters=True)
            says = rf"master weights of another policy \({name} is not its master weight.*keep_master_weights: false"
            with pytest.raises(UserError, match=says):
                one_step(group, machines(trainers), following, tmp_path / "next", zero_stage)


@pytest.mark.parametrize(
    ("training", "saves"),
    [
        ({"bf16": True, "lora": {}}, True),
        ({"lora": {}}, False),
        ({"bf16": True, "lora": {}, "keep_master_weights": False}, False),
        ({"bf16": True, "lora": {"load_in_4bit": True}}, False),
        ({"bf16": True, "lora": {"load_in_8bit": True}}, False),
    ],
)
def test_adapters_beside_weights_in_bf16_have_master_weights_under_the_key_of_before(
    training: dict[str, Any], saves: bool
) -> None:
    config = TrainingConfig(**training)
    assert config.saves_masters == saves
    in_key = "keep_master_weights" in config.model_dump()
    assert in_key == ("keep_master_weights" in training), "a stage without master weights in the cache stays valid"
