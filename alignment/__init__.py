"""What flows and plug-ins of one's own are written with: one import for all of it.

Each name is imported when it is first asked for, so that this costs nothing: ``alignment_core.public`` says where it is.
docs/flows.md and docs/extending.md show both uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from alignment_core.public import MODULE_OF

if TYPE_CHECKING:
    from alignment.flows.evaluation import Evaluations as Evaluations
    from alignment.flows.outputs import Outputs as Outputs
    from alignment.flows.own import Settings as Settings
    from alignment.flows.own import run as run
    from alignment.flows.runs import OpenRun as OpenRun
    from alignment.flows.start import base_and_start as base_and_start
    from alignment.flows.start import rewards as rewards
    from alignment.tasks.branches import branch as branch
    from alignment.tasks.branches import sharing as sharing
    from alignment.tasks.data import base_model as base_model
    from alignment.tasks.data import dataset as dataset
    from alignment.tasks.data import overlap as overlap
    from alignment.tasks.evaluation import evaluate as evaluate
    from alignment.tasks.evaluation import judge_pairs as judge_pairs
    from alignment.tasks.evaluation import lm_eval as lm_eval
    from alignment.tasks.evaluation import report as report
    from alignment.tasks.graph import Input as Input
    from alignment.tasks.graph import Step as Step
    from alignment.tasks.graph import artifact as artifact
    from alignment.tasks.graph import metrics as metrics
    from alignment.tasks.graph import submit as submit
    from alignment.tasks.kto import kto as kto
    from alignment.tasks.pretraining import continued_pretraining as continued_pretraining
    from alignment.tasks.process_reward import best_of_n as best_of_n
    from alignment.tasks.process_reward import process_reward_model as process_reward_model
    from alignment.tasks.rejection import gain as gain
    from alignment.tasks.rejection import select_best as select_best
    from alignment.tasks.rl import rl as rl
    from alignment.tasks.rollout import Rewards as Rewards
    from alignment.tasks.rollout import generate as generate
    from alignment.tasks.rollout import score as score
    from alignment.tasks.rollout import select_pairs as select_pairs
    from alignment.tasks.sweep import variants as variants
    from alignment.tasks.training import dpo as dpo
    from alignment.tasks.training import reference_logps as reference_logps
    from alignment.tasks.training import reward_model as reward_model
    from alignment.tasks.training import sft as sft
    from alignment_core.artifacts.opening import open_store as open_store
    from alignment_core.artifacts.reference import Reference as Reference
    from alignment_core.artifacts.store import Store as Store
    from alignment_core.columns import column as column
    from alignment_core.data.kinds import Format as Format
    from alignment_core.data.kinds.demonstrations import Demonstration as Demonstration
    from alignment_core.data.kinds.demonstrations import Demonstrations as Demonstrations
    from alignment_core.errors import AlignmentError as AlignmentError
    from alignment_core.errors import EnvironmentFault as EnvironmentFault
    from alignment_core.errors import UserError as UserError
    from alignment_core.execution.base import Stage as Stage
    from alignment_core.execution.base import StageConfig as StageConfig
    from alignment_core.execution.base import StageContext as StageContext
    from alignment_core.execution.training_loop import TRAINING_PACKAGES as TRAINING_PACKAGES
    from alignment_core.execution.training_loop import TRAINS as TRAINS
    from alignment_core.execution.training_loop import train as train
    from alignment_core.recipes.base import Config as Config
    from alignment_core.recipes.load import load_recipe as load_recipe
    from alignment_core.recipes.load import parse_recipe as parse_recipe
    from alignment_core.recipes.method import Method as Method
    from alignment_core.recipes.recipe import BaseRecipe as BaseRecipe
    from alignment_core.recipes.sections.data import DataConfig as DataConfig
    from alignment_core.recipes.sections.data import DataSource as DataSource
    from alignment_core.recipes.sections.evaluation import EvaluationConfig as EvaluationConfig
    from alignment_core.recipes.sections.evaluation import Gate as Gate
    from alignment_core.recipes.sections.evaluation import PromotionConfig as PromotionConfig
    from alignment_core.recipes.sections.kto import KtoLossConfig as KtoLossConfig
    from alignment_core.recipes.sections.model import ModelConfig as ModelConfig
    from alignment_core.recipes.sections.model import ScratchModel as ScratchModel
    from alignment_core.recipes.sections.preference import DpoLossConfig as DpoLossConfig
    from alignment_core.recipes.sections.rejection_sampling import BestConfig as BestConfig
    from alignment_core.recipes.sections.resources import ResourcesConfig as ResourcesConfig
    from alignment_core.recipes.sections.retention import RetentionConfig as RetentionConfig
    from alignment_core.recipes.sections.rewards import RewardConfig as RewardConfig
    from alignment_core.recipes.sections.rl import RlConfig as RlConfig
    from alignment_core.recipes.sections.rollout import GenerationConfig as GenerationConfig
    from alignment_core.recipes.sections.rollout import SelectionConfig as SelectionConfig
    from alignment_core.recipes.sections.tracking import TrackingConfig as TrackingConfig
    from alignment_core.recipes.sections.training import LoraConfig as LoraConfig
    from alignment_core.recipes.sections.training import RewardModelConfig as RewardModelConfig
    from alignment_core.recipes.sections.training import TrainingConfig as TrainingConfig
    from alignment_core.rewards.base import RewardKind as RewardKind
    from alignment_core.rewards.named import NamedVerifier as NamedVerifier
    from alignment_core.training.methods.base import BatchMethod as BatchMethod
    from alignment_core.training.methods.sft import Sft as Sft

__all__ = tuple(MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF})
