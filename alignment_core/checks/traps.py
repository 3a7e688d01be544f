"""Known traps: settings that are valid, and fail with real models, most of them silently. Each warning names its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alignment_core.evaluation import gates
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.base import Config
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.reference import default_at
from alignment_core.recipes.sections.preference import DpoLossConfig
from alignment_core.recipes.sections.rejection_sampling import RejectionSamplingConfig
from alignment_core.recipes.sections.rl import RlConfig

FAR = 10
"""A learning rate of more than this many times the method's default is a warning."""
OPTIMISED = ("reward", "win_rate")
"""Metrics of an evaluation by the reward model."""


def warnings(recipe: BaseRecipe) -> list[str]:
    """Warnings about a recipe before it runs: about its gates, and the traps in its sections, branches included."""
    found = [*gates.warnings(recipe), *_judged_by_what_it_optimises(recipe)]
    for path, section in _sections(recipe):
        if isinstance(section, TrainingConfig) and recipe.model.scratch is None:
            found += _learning_rate(path, section)
        if isinstance(section, DpoLossConfig):
            found += _simpo(path, section)
        if isinstance(section, RlConfig):
            found += _without_kl(path, section)
        if isinstance(section, RejectionSamplingConfig):
            found += _wrong_answers(path, section)
    branches: Mapping[str, BaseRecipe] = getattr(recipe, "recipes", {})
    for name, branch in branches.items():
        own = branch.model_copy(update={"promotion": None})
        found += [f"branches.{name}.{sentence}" for sentence in warnings(own)]
    return list(dict.fromkeys(found))


def _sections(section: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Config):
            inner = f"{path}.{name}" if path else name
            yield inner, value
            yield from _sections(value, inner)


def _learning_rate(path: str, training: TrainingConfig) -> Iterator[str]:
    usual = default_at(f"{path}.learning_rate")
    if training.lora is not None and training.learning_rate <= usual:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is a rate for training all weights; adapters need about ten "
            f"times as much, such as {10 * usual:g} (Schulman et al. 2025, LoRA Without Regret)"
        )
    if training.lora is None and round(training.learning_rate / usual) > FAR and usual < 1e-5:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is {training.learning_rate / usual:.0f} times the default of "
            f"{usual:g}; published recipes for pretrained models have 5e-7 to 1e-5 (docs/fields.md)"
        )


def _simpo(path: str, loss: DpoLossConfig) -> Iterator[str]:
    if "simpo" in loss.weights and loss.beta < 1:
        yield (
            f"{path}.beta: {loss.beta:g} is DPO's; SimPO's rewards are means per token and need 2 to 2.5, or up to 10 (Meng et "
            "al. 2024)"
        )


def _without_kl(path: str, rl: RlConfig) -> Iterator[str]:
    learned = [reward for reward in rl.rewards if getattr(reward, "reward_model", None) is not None]
    if learned and rl.kl.coefficient == 0:
        yield (
            f"{path}.kl.coefficient: 0 with a reward model lets the policy drift to whatever the model overrates (Gao et al. "
            "2023, Scaling Laws for Reward Model Overoptimization): 0.01 to 0.05 is usual"
        )


def _wrong_answers(path: str, section: RejectionSamplingConfig) -> Iterator[str]:
    selection = section.selection
    if selection.score == "verifier" and selection.strategy != "threshold" and selection.min_score is None:
        yield (
            f"{path}.selection.min_score: unset, so the best answer of a prompt is trained on even if the verifier finds it "
            "wrong; set it to the score of a right answer, such as 1"
        )


def _judged_by_what_it_optimises(recipe: BaseRecipe) -> Iterator[str]:
    """A promotion that only the reward model decides that the policy was trained against."""
    chosen = recipe.promotion.gates if recipe.promotion else ()
    optimises = getattr(recipe, "reward_model", None) is not None and any(
        getattr(recipe, name, None) is not None for name in ("rl", "iterative_dpo", "rejection_sampling")
    )
    rewards = recipe.evaluation.rewards if recipe.evaluation else ()
    if chosen and optimises and not rewards and all(gate.metric in OPTIMISED for gate in chosen):
        yield (
            "promotion.gates: all are judged by the reward model that the policy was trained against, and which also rises "
            "when the policy gets worse (Gao et al. 2023): add a verifier, or another reward model in `evaluation.rewards`"
        )
