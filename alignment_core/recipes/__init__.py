"""Recipes: frozen typed objects that are read from YAML.

The names below are imported on first use: modules of plug-ins import the sections, which must not load the modules that collect
the plug-ins.
"""
# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment_core.recipes.load import apply_overrides, folder_of, load_recipe, parse_recipe
    from alignment_core.recipes.recipe import BaseRecipe
    from alignment_core.recipes.sections.data import DataConfig, DataSource
    from alignment_core.recipes.sections.evaluation import EvaluationConfig, Gate, PromotionConfig
    from alignment_core.recipes.sections.model import ModelConfig, ScratchModel
    from alignment_core.recipes.sections.preference import DpoLossConfig
    from alignment_core.recipes.sections.resources import ResourcesConfig
    from alignment_core.recipes.sections.retention import RetentionConfig
    from alignment_core.recipes.sections.rl import RlConfig
    from alignment_core.recipes.sections.rollout import GenerationConfig, IterativeDpoConfig, SelectionConfig
    from alignment_core.recipes.sections.tracking import TrackingConfig, WandbConfig
    from alignment_core.recipes.sections.training import (
        DpoConfig,
        LoraConfig,
        RewardModelConfig,
        SftConfig,
        TrainingConfig,
    )

_NAMES = {
    "load": "apply_overrides folder_of load_recipe parse_recipe",
    "recipe": "BaseRecipe",
    "sections.data": "DataConfig DataSource",
    "sections.evaluation": "EvaluationConfig Gate PromotionConfig",
    "sections.model": "ModelConfig ScratchModel",
    "sections.resources": "ResourcesConfig",
    "sections.retention": "RetentionConfig",
    "sections.rl": "RlConfig",
    "sections.rollout": "GenerationConfig IterativeDpoConfig SelectionConfig",
    "sections.tracking": "TrackingConfig WandbConfig",
    "sections.preference": "DpoLossConfig",
    "sections.training": "DpoConfig LoraConfig RewardModelConfig SftConfig TrainingConfig",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except AttributeError as error:  # which Python would take for the name's not being here
        raise ImportError(f"{__name__}.{_MODULES[name]} does not load: AttributeError: {error}") from error
    found = globals()[name] = getattr(module, name)
    return found
