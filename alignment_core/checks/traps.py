"""Known traps: settings that are valid, and fail with real models, most of them silently.

A warning names the paper that shows it, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.doctor import machine
from alignment_core.evaluation import gates
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.base import Config
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections import rewards
from alignment_core.recipes.sections.evaluation import OF_SAMPLES
from alignment_core.recipes.sections.kto import KtoConfig
from alignment_core.recipes.sections.preference import DpoLossConfig, learning_rate
from alignment_core.recipes.sections.rejection_sampling import RejectionSamplingConfig
from alignment_core.recipes.sections.rl import LEARNED, CriticConfig, RlConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import WHOLE_MATRICES
from alignment_core.training.schedule import whole_steps

FAR = 10
"""A learning rate of more than this many times the method's default is a warning."""
FEW_STEPS = 30
"""Optimiser steps of a round or a night below which a warning says so."""
KTO_BATCH = 16
"""Rows of a batch of KTO, below which its baseline is noise."""
NOT_QUALITY = (*OF_SAMPLES, "length", "truncated", "reward_model_accuracy")
"""Metrics that say nothing about how good the policy's answers are."""


def warnings(recipe: BaseRecipe) -> list[str]:
    """Warnings about a recipe before it runs, its variants and branches included: about gates, and traps in sections."""
    sentences = [*gates.warnings(recipe), *_gated_by_the_optimised_reward(recipe), *_too_few_prompts(recipe)]
    device = recipe.resources.device
    on_gpus = recipe.model.scratch is None and (device == "cuda" or (device == "auto" and machine.has_gpu()))
    on_slow_cpus = recipe.model.scratch is None and not on_gpus and not cpu_multiplies_bf16()
    if recipe.method == "nightly" and recipe.model.scratch is None:
        night: Any = recipe  # its class is above this module
        sentences += _few_steps("nightly.min_rows", night.nightly.min_rows, night.dpo.training)
    for path, section, owner in _sections(recipe):
        if isinstance(section, TrainingConfig) and recipe.model.scratch is None:
            sentences += _learning_rate(path, section, owner)
        if isinstance(section, TrainingConfig | CriticConfig):
            sentences += _warmup(path, section, owner)
        if isinstance(section, TrainingConfig) and on_gpus:
            sentences += _fp32(path, section)
        if isinstance(section, TrainingConfig) and on_slow_cpus:
            sentences += _bf16(path, section)
        if isinstance(section, DpoLossConfig):
            sentences += _simpo(path, section)
        if isinstance(section, KtoConfig) and recipe.model.scratch is None:
            sentences += _small_batches_of_kto(path, section)
        if isinstance(section, IterativeDpoConfig) and recipe.model.scratch is None:
            selection = section.selection
            pairs = selection.max_pairs_per_prompt if selection.strategy == "all_pairs" else 1
            sentences += _few_steps(f"{path}.prompts_per_round", section.prompts_per_round, section.training, pairs)
        if isinstance(section, RlConfig):
            sentences += _without_kl(path, section)
            sentences += _kl_estimator(path, section)
            sentences += _gspo_by_token(path, section)
        if isinstance(section, RejectionSamplingConfig):
            sentences += _without_minimum(path, section)
    for place, part in _parts(recipe):
        own = warnings(part.model_copy(update={"promotion": None}))  # the whole is promoted
        sentences += [place + sentence for sentence in own if sentence not in sentences]  # of shared sections only once
    return sentences


def _parts(recipe: BaseRecipe) -> Iterator[tuple[str, BaseRecipe]]:
    """The recipes of a comparison's branches and of a sweep's variants, after the beginning of sentences about them.

    Compositions are above this module, and a plug-in may have other fields of these names.
    """
    for group, place in (("recipes", "branches.{}."), ("variants", "{}: ")):
        parts = getattr(recipe, group, None)
        for name, part in parts.items() if isinstance(parts, Mapping) else ():
            if isinstance(part, BaseRecipe):
                yield place.format(name), part


def _sections(section: Config, path: str = "") -> Iterator[tuple[str, Config, Config]]:
    """All sections below one, with their path and the section that holds each."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        inner = f"{path}.{name}" if path else name
        items = [(f"{inner}.{number}", item) for number, item in enumerate(value)] if isinstance(value, tuple) else []
        for place, item in items or [(inner, value)]:
            if isinstance(item, Config):
                yield place, item, section
                yield from _sections(item, place)


def _learning_rate(path: str, training: TrainingConfig, owner: Config) -> Iterator[str]:
    field = type(owner).model_fields.get(path.rpartition(".")[2])  # none for an item of a list
    default = field.get_default() if field else None
    usual = (default if isinstance(default, TrainingConfig) else TrainingConfig()).learning_rate
    usual = learning_rate(getattr(owner, "loss", None), usual)
    if training.lora is not None and training.learning_rate <= usual:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is a rate for training all weights; adapters need about ten "
            f"times as much, such as {10 * usual:g} (Schulman et al. 2025, LoRA Without Regret)"
        )
    # SFT and reward models, with a default of 1e-5, are also trained at rates of 1e-4.
    if training.lora is None and round(training.learning_rate / usual) > FAR and usual < 1e-5:
        yield (
            f"{path}.learning_rate: {training.learning_rate:g} is {training.learning_rate / usual:.0f} times the default of "
            f"{usual:g}; recipes for pretrained models in TRL and OpenRLHF have 5e-7 to 1e-5"
        )


def _warmup(path: str, training: TrainingConfig | CriticConfig, owner: Config) -> Iterator[str]:
    steps = owner.steps if isinstance(owner, RlConfig) else getattr(training, "max_steps", None)
    if isinstance(owner, RlConfig) and owner.critic and isinstance(training, TrainingConfig):
        steps = owner.steps - owner.critic.freezing_steps  # the policy's warm-up begins after them
    if steps is not None and (training.warmup_steps or 0) >= steps:
        yield (
            f"{path}.warmup_steps: training ends after {steps} steps, before the {training.warmup_steps} of the warm-up, so "
            "that the learning rate never reaches its peak"
        )


def _fp32(path: str, training: TrainingConfig) -> Iterator[str]:
    if not training.bf16 and training.optimizer not in WHOLE_MATRICES:
        yield (
            f"{path}.bf16: false trains in fp32, which takes a GPU several times as long and twice the memory for weights and "
            "activations; TRL and OpenRLHF train in bf16 by default, and so does a recipe with `resources.device: cuda`"
        )


def _bf16(path: str, training: TrainingConfig) -> Iterator[str]:
    if training.bf16:
        yield (
            f"{path}.bf16: this processor has no instructions for products of bf16 matrices, which take up to a hundred times "
            "as long as those of fp32: leave it out, unless the run is for another machine"
        )


def _simpo(path: str, loss: DpoLossConfig) -> Iterator[str]:
    if "simpo" in loss.weights and loss.beta < 1:
        yield (
            f"{path}.beta: {loss.beta:g} is DPO's; SimPO's rewards are means per token and need 2 to 2.5, or up to 10 (Meng et "
            "al. 2024)"
        )


def _small_batches_of_kto(path: str, kto: KtoConfig) -> Iterator[str]:
    if kto.loss.loss_type == "kto" and kto.training.batch_size < KTO_BATCH:
        yield (
            f"{path}.training.batch_size: {kto.training.batch_size} rows are few for KTO, whose KL baseline is a mean over the "
            f"batch: {KTO_BATCH} to 128 (TRL's documentation of KTO)"
        )


def _too_few_prompts(recipe: BaseRecipe) -> Iterator[str]:
    """Gates on a gain that a share of these prompts cannot show, where the recipe says how many they are."""
    if recipe.evaluation is None or recipe.promotion is None:
        return
    counts = [source.rows for source in recipe.evaluation.prompts.sources]
    if any(count is None for count in counts):
        return
    prompts = sum(count or 0 for count in counts)
    error = math.sqrt(0.5 * 0.5 / prompts)  # of a share near one half
    for number, gate in enumerate(recipe.promotion.gates):
        if gate.measures == "accuracy" and gate.min_gain is not None and 0 < gate.min_gain < error:
            yield (
                f"promotion.gates.{number}.min_gain: {gate.min_gain:g} is less than the standard error of an accuracy on "
                f"{prompts} prompts, up to {error:.2g} (Miller 2024, Adding Error Bars to Evals): evaluate on "
                f"{math.ceil(0.25 / gate.min_gain**2):,} prompts or more"
            )


def _few_steps(field: str, value: int, training: TrainingConfig, rows: int = 1) -> Iterator[str]:
    """Of training that starts again and again, on ``value`` times ``rows`` rows each time."""
    steps = whole_steps(training.num_train_epochs, math.ceil(value * rows / training.batch_size))
    steps = min(steps, training.max_steps or steps)
    if steps < FEW_STEPS:
        yield (
            f"{field}: {value:,} with a batch_size of {training.batch_size} are {steps} optimiser steps, each of which moves a "
            f"weight by no more than about the learning rate: {FEW_STEPS} steps or more show in an evaluation"
        )


def _without_kl(path: str, rl: RlConfig) -> Iterator[str]:
    learned = any(reward.KEY in LEARNED for reward in rl.rewards)
    if learned and rl.kl.coefficient == 0:
        yield (
            f"{path}.kl.coefficient: 0 with a reward model lets the policy drift to whatever the model overrates (Gao et al. "
            "2023, Scaling Laws for Reward Model Overoptimization): 0.01 to 0.05 is usual"
        )


def _kl_estimator(path: str, rl: RlConfig) -> Iterator[str]:
    kl = rl.kl
    if kl.coefficient == 0:
        return
    if kl.place == "loss" and kl.estimator == "k1" and not kl.unbiased_gradient:
        yield (
            f"{path}.kl.estimator: k1 in the loss has a gradient of zero on average, so that nothing holds the policy near the "
            "reference (Shah et al. 2025, A Comedy of Estimators): use k3, `unbiased_gradient: true`, or `place: reward`"
        )
    if kl.place == "reward" and kl.estimator != "k1":
        yield (
            f"{path}.kl.estimator: {kl.estimator} in the reward also drives down tokens that are rarer than in the reference, "
            "away from it (Shah et al. 2025, A Comedy of Estimators): use k1, the default there"
        )


def _gspo_by_token(path: str, rl: RlConfig) -> Iterator[str]:
    if rl.loss.loss_type == "gspo" and rl.loss.aggregation != "sequence-mean-token-mean":
        yield (
            f"{path}.loss.aggregation: {rl.loss.aggregation} weighs completions by their length, and GSPO's objective is a "
            "mean over completions (Zheng et al. 2025, Group Sequence Policy Optimization): use sequence-mean-token-mean"
        )


def _without_minimum(path: str, section: RejectionSamplingConfig) -> Iterator[str]:
    selection = section.selection
    if selection.score == "verifier" and selection.strategy != "threshold" and selection.min_score is None:
        yield (
            f"{path}.selection.min_score: unset, so the best answer of a prompt is trained on even if the verifier finds it "
            "wrong; set it to the score of a right answer, such as 1"
        )


def _gated_by_the_optimised_reward(recipe: BaseRecipe) -> Iterator[str]:
    gates = recipe.promotion.gates if recipe.promotion else ()
    optimised = [judge for _, section, _ in _sections(recipe) for judge in _optimised(section)]
    listed = (recipe.evaluation.rewards if recipe.evaluation else ()) or (rewards.ours(),)
    by_optimised = {f"reward_{number}" for number, reward in enumerate(listed) if _model_of(reward) in optimised}
    if all(_model_of(reward) in optimised for reward in listed if reward.weight):
        by_optimised |= {"reward", "win_rate"}
    quality = [gate.measures for gate in gates if gate.measures not in NOT_QUALITY]
    if quality and by_optimised.issuperset(quality):
        yield (
            "promotion.gates: all are judged by the reward model that the policy was trained against, and which also rises "
            "when the policy gets worse (Gao et al. 2023): add a verifier, or another reward model in `evaluation.rewards`"
        )


def _optimised(section: Config) -> list[tuple[str, Any]]:
    """The reward models that a section trains a policy on; `ours` is the recipe's own, which the section `rl` has to name."""
    if not isinstance(section, IterativeDpoConfig | RejectionSamplingConfig | RlConfig):
        return []
    if not section.rewards and not isinstance(section, RlConfig):
        return [_model_of(rewards.ours())] if section.selection.score == "reward" else []
    return [_model_of(reward) for reward in section.rewards if reward.model is not None]


def _model_of(reward: rewards.RewardConfig) -> tuple[str, Any]:
    """The model of a reward: `ours` is another one for a reward model and for a process reward model."""
    return reward.KEY, reward.model
