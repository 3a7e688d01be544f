"""An actor's own process: which failed allocations smaller micro-batches may avoid."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from alignment_core.artifacts import Reference
from alignment_core.cluster.actor import Actor, Call
from alignment_core.cluster.device import Device
from alignment_core.errors import EnvironmentFault, GpuOccupied, OutOfMemory
from alignment_core.execution.restarts import with_restarts
from alignment_core.memory import memory_explained
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig
from alignment_core.training import forward
from alignment_core.training.forward import ForwardJob
from alignment_core.training.teacher import TeacherJob

REASON = "CUDA out of memory. Tried to allocate 2.00 GiB."


def does_not_fit(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(REASON)


def test_a_model_that_does_not_fit_ends_its_stage_at_once(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TeacherJob(Model(tiny_model(), Reference("model", "a" * 64)), 8, False)
    device = Device.detect("cpu", 0)
    monkeypatch.setattr(PreTrainedModel, "to", does_not_fit)
    budgets: list[int] = []

    def attempt(resources: ResourcesConfig, _: Any) -> None:
        budgets.append(resources.token_budget)
        guard = partial(memory_explained, resources.token_budget)
        Actor("trainers[0]").make(job.open, {"resources": resources, "device": device}, guard)

    with pytest.raises(EnvironmentFault) as caught:
        with_restarts("teacher", ResourcesConfig(), threading.Event(), attempt)
    assert type(caught.value) is EnvironmentFault
    assert str(caught.value) == (
        f"trainers[0]: out of memory while models were loaded ({REASON}): set resources.zero_stage: 3, so that each "
        "trainer holds a part of every model, or use adapters (training.lora, with load_in_4bit for less memory), "
        "resources.offload_optimizer, a smaller model, or more or larger devices"
    )
    assert len(budgets) == 1, "smaller micro-batches would not help"


def test_layers_that_trainers_share_already_are_to_be_shared_by_more(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe refuses `zero_stage: 3` and LoRA beside them."""
    resources = ResourcesConfig(trainer_tensor_parallel_size=2)
    with pytest.raises(EnvironmentFault) as caught:
        Actor("trainers[0]").make(
            does_not_fit, {"resources": resources}, partial(memory_explained, resources.token_budget)
        )
    assert str(caught.value) == (
        f"trainers[0]: out of memory while models were loaded ({REASON}): set a larger "
        "resources.trainer_tensor_parallel_size, so that each holds a smaller part of every model, or use "
        "resources.offload_optimizer, a smaller model, or more or larger devices"
    )
    model = Model(tiny_model(), Reference("model", "a" * 64))
    monkeypatch.setattr(forward, "FrozenModel", does_not_fit)
    with pytest.raises(EnvironmentFault, match=r"a larger resources\.trainer_tensor_parallel_size, so that each holds"):
        ForwardJob(model, "lm").open(resources, Device("cpu", 2))


def test_a_micro_batch_that_does_not_fit_may_be_halved() -> None:
    class Trainer:
        train = does_not_fit

    actor = Actor("trainers[0]")
    actor.make(Trainer, {}, partial(memory_explained, 512))
    with pytest.raises(OutOfMemory, match=r"^out of memory with micro-batches of 512 tokens .*Tried to allocate"):
        actor.call(Call("train"))


@pytest.mark.parametrize(("of_trainer", "budgets"), [(20, [1024]), (60, [1024, 512, 256])], ids=["engine", "trainer"])
def test_micro_batches_are_halved_unless_an_engine_has_most_of_the_memory(
    of_trainer: int, budgets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 GiB 2 are free. There is no GPU: its numbers are those of a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: of_trainer << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tried: list[int] = []

    class Trainer:
        def __init__(self, resources: ResourcesConfig) -> None:
            self.tokens = resources.token_budget

        def train(self) -> None:
            tried.append(self.tokens)
            if self.tokens > 256:
                does_not_fit()

    def attempt(resources: ResourcesConfig, _: Any) -> None:
        actor = Actor("trainers[0]")
        actor.make(Trainer, {"resources": resources}, partial(memory_explained, resources.token_budget))
        actor.call(Call("train"))

    resources = ResourcesConfig(max_tokens_per_microbatch=1024)
    if of_trainer == 20:
        with pytest.raises(
            GpuOccupied, match=r"^sft: out of memory .* such as an engine, that hold 58\.0 of the GPU's"
        ):
            with_restarts("sft", resources, threading.Event(), attempt)
    else:
        with_restarts("sft", resources, threading.Event(), attempt)
    assert tried == budgets
