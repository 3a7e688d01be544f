"""DeepSpeed's engine on one rank, which has nothing to exchange."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from alignment_core.cluster.device import Device
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.engine import fill_gradients, make_engine
from alignment_core.training.optimizers import make_optimizer
from alignment_core.training.ranks import join


class Mixture(torch.nn.Module):
    """With an expert that may be idle."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.expert = torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, idle: bool) -> torch.Tensor:
        output: torch.Tensor = self.shared(rows)
        return output if idle else output + self.expert(rows)


def _step_alone(_: int, meet: str, bf16: bool) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("gradients were copied to be summed")

    resources = ResourcesConfig(device="cpu", threads=1)
    join(0, 1, meet, resources, Device("cpu", 1))
    torch.manual_seed(0)
    model = Mixture()
    rows = torch.randn(6, 4)
    plain = copy.deepcopy(model)
    config = TrainingConfig(learning_rate=0.01, weight_decay=0.1)
    engine = make_engine(model, make_optimizer(model, config, 0, resources), resources, 0, bf16, 0.0, "cpu")
    engine.allreduce_and_copy = fail
    optimizer = make_optimizer(plain, config, 0, resources)
    for idle in (False, True):
        engine.backward(engine(rows.bfloat16() if bf16 else rows, idle).float().square().mean())
        fill_gradients(model)
        engine.step()
        plain(rows, idle).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the gradient of an idle expert is zero, as on several ranks
    assert {float(state["step"]) for state in engine.basic_optimizer.state.values()} == {2.0}
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    if bf16:  # a gradient that rounding turns has AdamW step the other way
        assert float(sum((ours.float() - torchs).abs().mean() for ours, torchs in pairs)) / len(pairs) < 0.004
    else:
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_one_rank_steps_as_torch_does_and_copies_no_gradients(bf16: bool, tmp_path: Path) -> None:
    """bf16 rounds weights below 1 by up to 2⁻⁹ (0.002); two steps of 0.01 go up to 0.02."""
    multiprocessing.spawn(_step_alone, (f"file://{tmp_path}/meet", bf16), nprocs=1)
