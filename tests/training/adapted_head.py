"""A job with adapters on the head, in a module that trainer ranks can import."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from alignment_core.cluster.device import Device
from alignment_core.models.adapters import add_adapters
from alignment_core.recipes import ResourcesConfig
from alignment_core.training import learner
from alignment_core.training.trainer import Trainer, TrainJob


class HeadAdapted(TrainJob):
    """The head is not left out of the layers that get adapters, as it is with every recipe."""

    def open(self, resources: ResourcesConfig, device: Device, rank: int, world: int) -> Trainer:
        def on_head(model: Any, _head: Any, *arguments: Any, **options: Any) -> None:
            add_adapters(model, torch.nn.Identity(), *arguments, **options)

        with mock.patch.object(learner, "add_adapters", on_head):
            return super().open(resources, device, rank, world)
