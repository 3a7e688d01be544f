"""Optimisers by name: their parameters, exact resumption, and incompatible settings."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment_core.errors import UserError
from alignment_core.execution.packages import packages_of
from alignment_core.recipes import ResourcesConfig, TrainingConfig, parse_recipe
from alignment_core.recipes.base import REFUSE_UNUSED
from alignment_core.training.methods.sft import Sft
from alignment_core.training.optimizers import MuonAndAdamW, make_optimizer
from alignment_core.training.resumable import save_progress
from tests.matrix import matrix
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.inner = torch.nn.Linear(4, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)


def model_and_optimizer(name: str, **training: Any) -> tuple[Small, Any]:
    torch.manual_seed(0)
    model = Small()
    config = TrainingConfig(optimizer=name, learning_rate=0.1, **training)  # type: ignore[arg-type]
    return model, make_optimizer(model, config, 0, ResourcesConfig())


def step(model: Small, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_muon_trains_hidden_matrices_and_adamw_the_other_parameters() -> None:
    model, optimizer = model_and_optimizer("muon", weight_decay=0.3)
    assert isinstance(optimizer, MuonAndAdamW)
    muon, adam = optimizer.parts
    assert [parameter for group in muon.param_groups for parameter in group["params"]] == [model.inner.weight]
    decays = {group["weight_decay"]: group["params"] for group in adam.param_groups}
    assert [parameter.shape for parameter in decays[0.3]] == [model.lm_head.weight.shape]
    assert {tuple(parameter.shape) for parameter in decays[0.0]} == {(5, 4), (3,)}
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # as the schedule sets it
    before = [parameter.clone() for parameter in model.parameters()]
    step(model, optimizer, 1)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class Operators(TorchDispatchMode):
    """Names of the operators that get tensors of a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if any(isinstance(of, torch.Tensor) and of.device.type == self.device for of in tree_leaves(arguments)):
            self.names.add(function.name().removeprefix("aten::"))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_is_fused_on_every_device(name: str, device: str) -> None:
    """Tensors with a device and a shape, but without memory, stand for those of a GPU."""
    model = Small()
    with FakeTensorMode():
        for module in (model.embed, model.inner, model.lm_head):
            for at, parameter in [*module.named_parameters()]:
                setattr(module, at, torch.nn.Parameter(torch.empty(parameter.shape, device=device)))
                getattr(module, at).grad = torch.empty(parameter.shape, device=device)
        optimizer: Any = make_optimizer(model, TrainingConfig(optimizer=name), 0, ResourcesConfig())  # type: ignore[arg-type]
        with Operators(device) as operators:
            optimizer.step()
    adamw = optimizer.parts[1] if name == "muon" else optimizer
    assert all(group["fused"] for group in adamw.param_groups)
    assert "_fused_adamw_" in operators.names
    assert not any("addcdiv" in operator for operator in operators.names), "the end of a step that is not fused"


def test_a_step_of_muon_is_orthogonal_with_the_size_of_an_adamw_step() -> None:
    model, optimizer = model_and_optimizer("muon")
    before = model.inner.weight.detach().clone()
    step(model, optimizer, 1)
    change = (before - model.inner.weight.detach()) / (0.1 * 0.2 * 4**0.5)  # Liu et al. 2025: 0.2 √max(rows, columns)
    assert torch.linalg.svdvals(change) == pytest.approx(torch.ones(3), abs=0.35), (
        "Newton-Schulz in five steps is rough"
    )


def test_muon_leaves_a_head_of_any_name_to_adamw() -> None:
    class Captions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.output = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 5, bias=False)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.output

    model = torch.nn.ModuleDict({"model": Captions()})
    optimizer: Any = make_optimizer(model, TrainingConfig(optimizer="muon"), 0, ResourcesConfig())
    of_parts = [[tuple(p.shape) for group in part.param_groups for p in group["params"]] for part in optimizer.parts]
    assert of_parts == [[(3, 4)], [(5, 3)]]


def test_adafactor_takes_the_steps_of_the_trainer_of_transformers() -> None:
    model, optimizer = model_and_optimizer("adafactor", weight_decay=0.3)
    expected = copy.deepcopy(model)
    decay = {expected.inner.weight: 0.3, expected.lm_head.weight: 0.3}
    theirs = transformers.optimization.Adafactor(
        [{"params": [parameter], "weight_decay": decay.get(parameter, 0.0)} for parameter in expected.parameters()],
        lr=0.1,
        scale_parameter=False,  # as TrainingArguments(optim="adafactor") sets it
        relative_step=False,
    )
    for seed in range(5):
        step(model, optimizer, seed)
        step(expected, theirs, seed)
    for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


def test_adafactor_moves_weights_that_are_zero_as_far_as_others() -> None:
    """As the B of LoRA is at first. The first estimate of a square of a vector is the square itself: a step is ± the rate."""
    model, optimizer = model_and_optimizer("adafactor")
    torch.nn.init.zeros_(model.inner.bias)
    step(model, optimizer, 1)
    torch.testing.assert_close(model.inner.bias.detach().abs(), torch.full((3,), 0.1))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit", "muon", "adafactor"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_state_dict_of_an_optimiser_is_complete(name: str) -> None:
    model, optimizer = model_and_optimizer(name)
    for seed in range(3):
        step(model, optimizer, seed)
    again, other = model_and_optimizer(name)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(again, other, seed)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_resumed_job_ends_in_the_same_bytes_for_any_number_of_ranks(
    name: str, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = make_job(Sft(), optimizer=name), tmp_path / "progress"
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, progress, zero_stage=0)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(1), job, progress, zero_stage=0)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole
    before = load_file(job.model.path / "model.safetensors")
    after = load_file(tmp_path / "whole" / "model.safetensors")
    change = greatest_difference({name: before[name] for name in after}, after)
    assert change > 1e-3, "it did train"
    two = trained(machines(2), job, tmp_path / "two", steps=6, zero_stage=0)
    # Adafactor computes in fp32. Muon's Newton-Schulz steps are in bf16: where the sum over two ranks rounds a gradient to
    # another number of 8 bits, five of these steps enlarge the difference, to 2 or 3 % of the change by the kernels of the CPU.
    assert greatest_difference(after, two) < (0.1 * change if name == "muon" else 1e-6)
    with machines(2).trainers() as group, pytest.raises(UserError, match=r"set resources\.zero_stage to 0"):
        open_job(group, machines(2), job, tmp_path / "sharded")


def test_unsupported_settings_of_an_optimiser_are_refused_in_the_recipe() -> None:
    with pytest.raises(ValueError, match="`bf16` partitions the fp32 weights: use `adamw`"):
        TrainingConfig(optimizer="muon", bf16=True)
    with pytest.raises(ValueError, match="`adam_beta2` has no effect with `optimizer: adafactor`"):
        TrainingConfig.model_validate({"optimizer": "adafactor", "adam_beta2": 0.9}, context=REFUSE_UNUSED)
    assert "optimizer" not in TrainingConfig().model_dump()
    content = {"method": "sft", "name": "a", "model": "m", "sft": {"data": "d.jsonl", "training": {"optimizer": "sgd"}}}
    with pytest.raises(UserError, match=r"sft\.training\.optimizer: input should be 'adamw', 'adamw_8bit', "):
        parse_recipe(content)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 100)
        self.inner = torch.nn.Linear(100, 64)


def wide(make: Any) -> tuple[Wide, Any]:
    torch.manual_seed(0)
    model = Wide()
    return model, make(model)


def test_moments_in_8_bits_are_those_of_bitsandbytes_and_embeddings_those_of_adamw() -> None:
    """3 steps with gradients that differ by token, by 1e-3 to 1e3. The bias has fewer than 4,096 elements."""
    import bitsandbytes

    config = TrainingConfig(optimizer="adamw_8bit", learning_rate=0.1, weight_decay=0.3, adam_beta2=0.99)
    ours, our_optimizer = wide(lambda model: make_optimizer(model, config, 0, ResourcesConfig()))
    rate: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99)}
    exact, adamw = wide(lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.0, **rate))
    theirs, eight = wide(lambda model: bitsandbytes.optim.AdamW8bit([model.inner.weight], weight_decay=0.3, **rate))
    scales = torch.logspace(-3, 3, 64)[:, None]
    for seed in range(3):
        for model, optimizer in ((ours, our_optimizer), (exact, adamw), (theirs, eight)):
            torch.manual_seed(seed)
            model.embed.weight.grad = torch.randn(64, 100) * scales
            model.inner.weight.grad = torch.randn(64, 100)
            model.inner.bias.grad = torch.randn(64)
            optimizer.step()
    assert torch.equal(ours.inner.weight, theirs.inner.weight)
    assert torch.allclose(ours.embed.weight, exact.embed.weight, atol=1e-6)
    assert torch.allclose(ours.inner.bias, exact.inner.bias, atol=1e-6)
    kinds = [our_optimizer.state[parameter]["state1"].dtype for parameter in ours.parameters()]
    assert kinds == [torch.float32, torch.uint8, torch.float32]  # embedding, weight, bias


@pytest.mark.parametrize(
    ("zero_stage", "bf16"), matrix((0, 1, 2, 3), (False, True), usual=[(0, False), (2, True), (3, False)])
)
def test_a_job_with_moments_in_8_bits_learns_as_with_adamw_and_resumes_to_the_same_bytes(
    zero_stage: int, bf16: bool, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = make_job(Sft(), optimizer="adamw_8bit", bf16=bf16), tmp_path / "progress"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress, zero_stage=zero_stage)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole")
        ranks, state = opened(group, machines(2), job, progress, zero_stage=zero_stage)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole.read_bytes()
    exact = trained(machines(1), make_job(Sft(), bf16=bf16), tmp_path / "exact", steps=6, zero_stage=0)
    before = load_file(job.model.path / "model.safetensors")
    after = {name: tensor.float() for name, tensor in load_file(whole).items()}
    change = torch.cat([(exact[name].float() - before[name].float()).flatten() for name in after])
    off = torch.cat([(after[name] - exact[name].float()).flatten() for name in after])
    # Quantized moments change an update by some percent.
    assert off.norm() < 0.1 * change.norm()
    assert bf16 or off.norm() > 1e-4 * change.norm(), "the moments are in 8 bits"


def test_settings_that_moments_in_8_bits_do_not_support_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig(optimizer="paged_adamw_8bit", bf16=True)
    for field, value in (("offload_optimizer", True), ("progress", "store")):
        with pytest.raises(UserError, match=rf"^training\.optimizer: 'paged_adamw_8bit' .*resources\.{field}"):
            make_optimizer(Small(), config, 2, ResourcesConfig.model_validate({field: value}))
    assert packages_of(config) == ("bitsandbytes",)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(UserError, match=r"^training\.optimizer: .*not installed; .*'alignment\[qlora\]'$"):
        packages_of(config)
