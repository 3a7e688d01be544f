"""Trainers that rest: they take no memory of the device meanwhile, and compute the same bits afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from alignment_core.errors import EnvironmentFault
from alignment_core.training import resting
from alignment_core.training.resting import Resting, storages_of
from tests.training import resting_ranks, sharded_ranks

ALL = {
    "kl": {"coefficient": 0.1},
    "ema": {"decay": 0.75},
    "advantage": {"estimator": "gae"},
    "critic": {"learning_rate": 1e-2},
}
"""Every model that a trainer may have: policy, critic with a value head, reference, and a moving average."""
BF16 = {"training": {"bf16": True}}


def following(mixup: float) -> dict[str, Any]:
    return {"kl": {"coefficient": 0.1, "sync_ref_model": {"mixup_alpha": mixup, "sync_steps": 1}}}


def with_lora(**more: Any) -> dict[str, Any]:
    return {**ALL, "training": {"lora": {"r": 4, **more}}}


CASES: dict[int, dict[str, Any]] = {
    1: {f"stage {stage}": {**ALL, "resources": {"zero_stage": stage}} for stage in range(4)}
    | {
        "offloaded optimiser": {**ALL, "resources": {"zero_stage": 2, "offload_optimizer": True}},
        "LoRA": {**with_lora(), "resources": {"zero_stage": 0}},
    },
    2: {f"stage {stage}": {**ALL, "resources": {"zero_stage": stage}} for stage in range(4)}
    | {f"stage {stage}, bf16": {**ALL, **BF16, "resources": {"zero_stage": stage}} for stage in range(4)}
    | {f"LoRA, stage {stage}": {**with_lora(), "resources": {"zero_stage": stage}} for stage in (2, 3)}
    | {
        "LoRA on weights in 4 bits": {**with_lora(load_in_4bit=True), "resources": {"zero_stage": 1}},
        "mixed reference": {**following(0.5), "resources": {"zero_stage": 1}},
        "mixed reference, stage 3": {**following(0.5), **BF16, "resources": {"zero_stage": 3}},
        "checkpoints for the store": {**ALL, "resources": {"zero_stage": 2, "progress": "store"}},
    },
}


@pytest.fixture(scope="module")
def ranks(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """The results of all cases of so many ranks, by rank."""

    @functools.cache
    def run(world: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        return sharded_ranks.run(world, folder, resting_ranks.results, str(tiny_model()), CASES[world])

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_a_trainer_that_rests_after_every_step_computes_the_same_bits(
    world: int, case: str, ranks: Callable[[int], list[Any]]
) -> None:
    for result in (of_rank[case] for of_rank in ranks(world)):
        assert result["rested"] == result["awake"]
        assert len(set(result["awake"])) == resting_ranks.STEPS, "each step changes the models"
        assert result["resumed"] == result["awake"][2:], "the checkpoint was written after a rest"
        assert result["sent"][0] == result["sent"][1], "all but the policy's weights rested"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_a_trainer_that_rests_has_no_memory_on_its_device(
    world: int, case: str, ranks: Callable[[int], list[Any]]
) -> None:
    """Counted are the tensors of the whole process, without regard to whose they are."""
    for result in (of_rank[case] for of_rank in ranks(world)):
        assert result["bytes at rest"] <= 0.01 * result["bytes"]


class Trainer:
    """Tensors in places where DeepSpeed has them."""

    def __init__(self) -> None:
        self.weights = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.weights.grad = torch.ones(2, 3)
        self.row = self.weights.detach()[1]
        self.weights.part = torch.full((3,), 0.5)  # type: ignore[attr-defined]
        self.states = {self.weights: {"moment": torch.ones(5, dtype=torch.bfloat16)}}
        buffer = torch.full((7,), 7.0)
        self.hook = lambda: buffer
        self.bound = functools.partial(torch.Tensor.sum, torch.full((9,), 9.0))

    def values(self) -> list[Tensor]:
        (state,) = self.states.values()
        of_weights: Any = self.weights
        tensors = [self.weights, self.weights.grad, self.row, of_weights.part, state["moment"], self.hook()]
        return [tensor.detach().clone() for tensor in [*tensors, self.bound()]]

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in storages_of(self, torch.device("cpu")))


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def unchanged(trainer: Trainer) -> bool:
    return all(torch.equal(*pair) for pair in zip(trainer.values(), Trainer().values(), strict=True))


def test_every_tensor_that_a_trainer_leads_to_is_freed_and_comes_back(trainer: Trainer) -> None:
    """By hand: weights, gradient, the attribute of the weights, the moment in bf16, the closure's and the bound tensor."""
    assert trainer.bytes() == 6 * 4 + 6 * 4 + 3 * 4 + 5 * 2 + 7 * 4 + 9 * 4
    resting = Resting(trainer, "cpu")
    for _ in range(2):
        resting.rest()
        resting.rest()
        assert trainer.bytes() == 0
        with pytest.raises(RuntimeError, match="must wake first"):
            resting.check_awake()
        resting.wake()
        resting.wake()
        resting.check_awake()
        assert unchanged(trainer)
    trainer.row.fill_(5.0)
    assert trainer.weights[1].tolist() == [5.0] * 3, "a view is still one"


def test_what_is_kept_rests_later(trainer: Trainer) -> None:
    resting = Resting(trainer, "cpu")
    resting.rest(keep=[trainer.weights.untyped_storage()])
    assert trainer.bytes() == trainer.weights.nbytes
    assert trainer.row.tolist() == [3.0, 4.0, 5.0]
    resting.rest()
    assert trainer.bytes() == 0
    resting.wake()
    assert unchanged(trainer)


def test_a_trainer_for_which_the_cpu_has_no_room_stays_on_its_device(trainer: Trainer) -> None:
    resting_trainer = Resting(trainer, "cpu")
    slabs: list[Tensor] = []

    def empty(*arguments: Any, **more: Any) -> Tensor:
        if "pin_memory" in more:
            if len(slabs) == 3:
                raise RuntimeError("CUDA error: out of memory")
            slabs.append(torch.zeros(*arguments, dtype=torch.uint8))
            return slabs[-1]
        return torch.zeros(*arguments, **more)

    before = trainer.bytes()
    with (
        patch.object(resting, "SLAB_BYTES", 20),
        patch.object(resting.torch, "empty", empty),
        pytest.raises(EnvironmentFault, match="offload_while_sampling: only"),
    ):
        resting_trainer.rest()
    assert trainer.bytes() == before
    resting_trainer.check_awake()
    assert unchanged(trainer)


def test_the_memory_of_another_object_stays(trainer: Trainer) -> None:
    other = Trainer()
    Resting(trainer, "cpu").rest()
    assert unchanged(other)
