"""The bytes that the ranks of a trained model hold; started by test_memory_of_models.py."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import torch

from alignment_core.models.microbatch import Row, TokenSequence
from alignment_core.recipes import ResourcesConfig, TrainingConfig
from alignment_core.training.learner import Learner, ModelSource, Term
from alignment_core.training.step_report import StepReport
from tests.training.sharded_ranks import DEVICE, _loss, model_at


def resident(rank: int, world: int, path: str, stage: int, bf16: bool) -> int:
    """Bytes of all storages of a model and its optimiser when the second step has its gradients."""
    before = _held()
    resources = ResourcesConfig(trainers=world, zero_stage=stage, threads=1)
    training = TrainingConfig(bf16=bf16)
    learner = Learner(ModelSource(model_at(path), "lm"), training, resources, DEVICE, rank, world)
    ids = torch.randint(0, 250, (4, 30), generator=torch.Generator().manual_seed(3)).numpy()
    rows = [Row(number, (TokenSequence.of_prompt_and_completion(of[:9], of[9:]),)) for number, of in enumerate(ids)]
    held = 0
    step = learner.engine.step

    def measured(*of: Any) -> Any:
        nonlocal held
        held = sum(size for address, size in _held().items() if address not in before)
        return step(*of)

    with patch.object(learner.engine, "step", measured):
        for _ in range(2):
            learner.step([Term(rows, _loss, 50.0, StepReport())], 1e-2)
    learner.close()
    return held


def _held() -> dict[int, int]:
    """Bytes of each storage by its address."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):  # gradients have no Python objects of their own
            if tensor is not None:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sizes
