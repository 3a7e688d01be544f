"""The names that this package imports on first use, for type checkers and for ``alignment_core.public``."""

from alignment_core.recipes.load import apply_overrides as apply_overrides
from alignment_core.recipes.load import folder_of as folder_of
from alignment_core.recipes.load import load_recipe as load_recipe
from alignment_core.recipes.load import parse_recipe as parse_recipe
from alignment_core.recipes.recipe import BaseRecipe as BaseRecipe
from alignment_core.recipes.sections.data import DataConfig as DataConfig
from alignment_core.recipes.sections.data import DataSource as DataSource
from alignment_core.recipes.sections.evaluation import EvaluationConfig as EvaluationConfig
from alignment_core.recipes.sections.evaluation import Gate as Gate
from alignment_core.recipes.sections.evaluation import PromotionConfig as PromotionConfig
from alignment_core.recipes.sections.model import ModelConfig as ModelConfig
from alignment_core.recipes.sections.model import ScratchModel as ScratchModel
from alignment_core.recipes.sections.preference import DpoLossConfig as DpoLossConfig
from alignment_core.recipes.sections.resources import ResourcesConfig as ResourcesConfig
from alignment_core.recipes.sections.retention import RetentionConfig as RetentionConfig
from alignment_core.recipes.sections.rl import RlConfig as RlConfig
from alignment_core.recipes.sections.rollout import GenerationConfig as GenerationConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig as IterativeDpoConfig
from alignment_core.recipes.sections.rollout import SelectionConfig as SelectionConfig
from alignment_core.recipes.sections.tracking import TrackingConfig as TrackingConfig
from alignment_core.recipes.sections.tracking import WandbConfig as WandbConfig
from alignment_core.recipes.sections.training import DpoConfig as DpoConfig
from alignment_core.recipes.sections.training import LoraConfig as LoraConfig
from alignment_core.recipes.sections.training import RewardModelConfig as RewardModelConfig
from alignment_core.recipes.sections.training import SftConfig as SftConfig
from alignment_core.recipes.sections.training import TrainingConfig as TrainingConfig
