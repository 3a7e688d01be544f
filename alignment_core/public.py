"""The names of ``alignment``, the one import of flows and plug-ins of one's own, and the modules that have them.

They lie here because stage keys need them too: a plug-in that imports a name from ``alignment`` computes with the module that
has it.
"""

from __future__ import annotations

from collections.abc import Mapping

FACADE = "alignment"
_MODULES: Mapping[str, str] = {
    # flows of one's own
    "alignment.flows.own": "Settings run",
    "alignment.flows.runs": "OpenRun",
    "alignment.flows.evaluation": "Evaluations",
    "alignment.flows.outputs": "Outputs",
    "alignment.flows.start": "base_and_start rewards",
    "alignment.tasks.graph": "Input Step artifact metrics submit",
    "alignment.tasks.branches": "branch sharing",
    # a function for each kind of stage
    "alignment.tasks.data": "base_model dataset overlap",
    "alignment.tasks.training": "dpo reference_logps reward_model sft",
    "alignment.tasks.kto": "kto",
    "alignment.tasks.pretraining": "continued_pretraining",
    "alignment.tasks.process_reward": "best_of_n process_reward_model",
    "alignment.tasks.rejection": "gain select_best",
    "alignment.tasks.rl": "rl",
    "alignment.tasks.rollout": "Rewards generate score select_pairs",
    "alignment.tasks.evaluation": "evaluate judge_pairs lm_eval report",
    "alignment.tasks.sweep": "variants",
    # recipes and their sections
    "alignment_core.recipes.load": "load_recipe parse_recipe",
    "alignment_core.recipes.base": "Config",
    "alignment_core.recipes.recipe": "BaseRecipe",
    "alignment_core.recipes.method": "Method",
    "alignment_core.recipes.sections.data": "DataConfig DataSource",
    "alignment_core.recipes.sections.evaluation": "EvaluationConfig Gate PromotionConfig",
    "alignment_core.recipes.sections.kto": "KtoLossConfig",
    "alignment_core.recipes.sections.model": "ModelConfig ScratchModel",
    "alignment_core.recipes.sections.preference": "DpoLossConfig",
    "alignment_core.recipes.sections.rejection_sampling": "BestConfig",
    "alignment_core.recipes.sections.resources": "ResourcesConfig",
    "alignment_core.recipes.sections.retention": "RetentionConfig",
    "alignment_core.recipes.sections.rewards": "RewardConfig",
    "alignment_core.recipes.sections.rl": "RlConfig",
    "alignment_core.recipes.sections.rollout": "GenerationConfig SelectionConfig",
    "alignment_core.recipes.sections.tracking": "TrackingConfig",
    "alignment_core.recipes.sections.training": "LoraConfig RewardModelConfig TrainingConfig",
    # the store, and what went wrong
    "alignment_core.artifacts.reference": "Reference",
    "alignment_core.artifacts.opening": "open_store",
    "alignment_core.artifacts.store": "Store",
    "alignment_core.errors": "AlignmentError EnvironmentFault UserError",
    # plug-ins
    "alignment_core.execution.base": "Stage StageConfig StageContext",
    "alignment_core.execution.training_loop": "TRAINING_PACKAGES TRAINS train",
    "alignment_core.training.methods.base": "BatchMethod",
    "alignment_core.training.methods.sft": "Sft",
    "alignment_core.columns": "column",
    "alignment_core.data.kinds": "Format",
    "alignment_core.data.kinds.demonstrations": "Demonstration Demonstrations",
    "alignment_core.rewards.base": "RewardKind",
    "alignment_core.rewards.named": "NamedVerifier",
}
MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module that has each name."""
