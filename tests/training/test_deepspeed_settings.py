"""The settings that DeepSpeed gets on a GPU, which needs none: they are plain data."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import CriticPlacement, FrozenPlacement, ModelPlacements
from alignment_core.training.engine import _transfers


@pytest.mark.parametrize(
    ("wanted", "device", "settings"),
    [
        ({}, "cuda", {"overlap_comm": False}),
        ({"overlap_comm": True}, "cuda", {"overlap_comm": True}),
        ({"overlap_comm": True}, "cpu", {"overlap_comm": False}),
        (
            {"offload_optimizer": True},
            "cuda",
            {"overlap_comm": False, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        ),
        (
            {"offload_optimizer": True, "pin_memory": False},
            "cuda",
            {"overlap_comm": False, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        ),
    ],
)
def test_overlap_and_page_locked_memory_are_those_of_the_recipe(
    wanted: dict[str, Any], device: str, settings: dict[str, Any]
) -> None:
    assert _transfers(ResourcesConfig(**wanted), device) == settings


def test_models_beside_the_policy_use_the_same_memory() -> None:
    placements = ModelPlacements(
        critic=CriticPlacement(offload_optimizer=True),
        reference=FrozenPlacement(gpus=1, zero_stage=3, offload_parameters=True),
    )
    resources = ResourcesConfig(models=placements, pin_memory=False)
    assert _transfers(resources.of_model("critic"), "cuda")["offload_optimizer"]["pin_memory"] is False
    offloaded = resources.of_model("reference").deepspeed["zero_optimization"]["offload_param"]
    assert offloaded == {"device": "cpu", "pin_memory": False}
