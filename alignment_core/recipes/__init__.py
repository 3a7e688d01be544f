"""Recipes: what to run, as frozen typed objects that come from YAML."""

from alignment_core.recipes.load import apply_overrides, folder_of, load_recipe, parse_recipe
from alignment_core.recipes.recipe import (
    BaseRecipe,
    DpoRecipe,
    IterativeDpoRecipe,
    NightlyRecipe,
    Recipe,
    RewardModelRecipe,
    RlRecipe,
    SftRecipe,
)
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.recipes.sections.evaluation import EvaluationConfig, Gate, PromotionConfig
from alignment_core.recipes.sections.model import ModelConfig, ScratchModel
from alignment_core.recipes.sections.nightly import NightlyConfig
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.retention import RetentionConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.rollout import GenerationConfig, IterativeDpoConfig, SelectionConfig
from alignment_core.recipes.sections.tracking import TrackingConfig, WandbConfig
from alignment_core.recipes.sections.training import (
    DpoConfig,
    DpoLossConfig,
    LoraConfig,
    RewardModelConfig,
    SftConfig,
    TrainingConfig,
)

__all__ = [
    "BaseRecipe",
    "DataConfig",
    "DataSource",
    "DpoConfig",
    "DpoLossConfig",
    "DpoRecipe",
    "EvaluationConfig",
    "Gate",
    "GenerationConfig",
    "IterativeDpoConfig",
    "IterativeDpoRecipe",
    "LoraConfig",
    "ModelConfig",
    "NightlyConfig",
    "NightlyRecipe",
    "PromotionConfig",
    "Recipe",
    "ResourcesConfig",
    "RetentionConfig",
    "RewardModelConfig",
    "RewardModelRecipe",
    "RlConfig",
    "RlRecipe",
    "ScratchModel",
    "SelectionConfig",
    "SftConfig",
    "SftRecipe",
    "TrackingConfig",
    "TrainingConfig",
    "WandbConfig",
    "apply_overrides",
    "folder_of",
    "load_recipe",
    "parse_recipe",
]
