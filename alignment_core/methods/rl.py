"""The method ``rl``: reinforcement learning (PPO, REINFORCE++, RLOO, GRPO), after SFT if the recipe has that section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, reward_model, rewards
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.guess import ColumnMapping, guess_columns
from alignment_core.init.text import Commented
from alignment_core.init.verifying import labels, verifier_of
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.resources import FrozenPlacement
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig
from alignment_core.rewards.base import kind_of


class RlRecipe(BaseRecipe):
    """SFT → steps of sample, reward, train → evaluation → promotion."""

    SAMPLES: ClassVar[bool] = True
    method: Literal["rl"] = "rl"
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their relatives."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model that `rl.rewards` and `evaluation.rewards` refer to as `ours`; a critic is initialised from it,
    too."""
    rl: RlConfig
    """The steps."""

    @model_validator(mode="after")
    def _section_fits(self) -> RlRecipe:
        if self.reward_model:
            self.reward_model.check_origin()
        self.check_ours(self.rl.rewards, "rl.rewards")
        self.check_used(self.rl.rewards, "rl.rewards")
        best = self.rl.best.prompts if self.rl.best else None
        for reward in self.rl.rewards:
            reward.check(self.rl.prompts, "rl.prompts")
            if best is not None:
                reward.check(best, "rl.best.prompts")
        is_placed = self.rl.kl.coefficient > 0 and self.resources.models.reference != FrozenPlacement()
        if is_placed and (problem := self.rl.why_reference_is_beside(self.rl.kl.reference is not None)):
            raise ValueError(f"`resources.models.reference`: {problem}")
        if self.resources.models.reward_models:
            self._check_places_of_rewards()
        lora, most = self.rl.training.lora, self.resources.max_lora_rank
        if lora and most is not None and lora.is_addable and lora.r > most:
            raise ValueError(
                f"`rl.training.lora.r` is {lora.r}, above `resources.max_lora_rank` {most}: raise that, or leave it out, so "
                "that engines get merged weights"
            )
        if self.resources.weight_update_mode == "delta":
            self._check_deltas(sends_adapter=lora is not None and most is not None and lora.is_addable)
        return self

    def _check_places_of_rewards(self) -> None:
        """Raise ValueError for GPUs of reward models that there are not."""
        models, count = self.resources.models, sum(kind_of(reward).actors for reward in self.rl.rewards)
        if len(models.reward_models) > count:
            raise ValueError(
                f"`resources.models.reward_models` places {len(models.reward_models)} reward models, and `rl.rewards` has "
                f"{count}: give at most one entry for each"
            )
        if models.reward.gpus and len(models.reward_models) == count:
            raise ValueError(
                "`resources.models.reward.gpus` has no reward model, because `reward_models` places all of them: leave it out"
            )

    def _check_deltas(self, sends_adapter: bool) -> None:
        """Raise ValueError where updates as deltas would send no less."""
        if sends_adapter:
            raise ValueError(
                "`resources.weight_update_mode: delta` has no effect with `resources.max_lora_rank`, with which engines get "
                "the adapter alone: leave one of them out"
            )
        if not self.rl.training.bf16:
            raise ValueError(
                "`resources.weight_update_mode: delta` needs `rl.training.bf16: true`: in fp32 nearly all weights change in "
                "each step"
            )


def compose(recipe: RlRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    prompts = steps.dataset("rl/prompts", recipe.rl.prompts, "prompts", base)
    judge = reward_model(recipe.reward_model, base, start)
    reward_models = rewards("rl.rewards", recipe.rl.rewards, judge, "rl").models
    number = recipe.rl.first_reward_model
    critic = reward_models[f"reward-{number}"] if recipe.rl.critic and number is not None else None
    pretraining = held_out = None
    if recipe.rl.pretraining:
        pretraining = steps.dataset("rl/pretraining", recipe.rl.pretraining.data, "demonstrations", base)
    if recipe.rl.best:
        held_out = steps.dataset(
            "rl/held-out", recipe.rl.best.prompts, "prompts", base, stream="held-out", held_out=True
        )
        steps.overlap("rl/held-out/overlap", "rl.best.prompts", held_out, None)
    reference = steps.base_model("rl/reference", recipe.rl.kl.reference) if recipe.rl.kl.reference else None
    policy = steps.rl("rl", recipe.rl, start, prompts, reward_models, critic, pretraining, held_out, reference)
    before = "sft" if recipe.sft else "start"
    return Evaluations(recipe, base, judge).outputs({before: start, "rl": policy}, reward_model=judge)


GENERATIONS = 8
SMALL = 400_000_000
"""Parameters below which a first recipe has five times the usual learning rate. Published runs at 1e-6 are of 0.5B and more
(TinyZero, Open-R1). Measured on SmolLM2-135M with 32 answers a step: at 1e-6 the reward does not rise in 30 steps; at 5e-6 it
does, from 0.50 to 0.64."""


def fits(rows: Sequence[Mapping[str, Any]], mapping: ColumnMapping) -> bool:
    """Whether the rows have bare answers that can be verified, and no other column to imitate."""
    column = mapping.columns.get("label")
    if column is None or verifier_of(labels(rows, mapping.columns), worked=False) is None:
        return False
    shown = guess_columns(rows, "demonstrations", ("prompt_completion",), {}, mapping.images)
    return shown is None or (shown.columns["completion"] == column and column != "completion")


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe (GRPO) from prompts with an answer that a verifier compares with, or from prompts and reward functions."""
    reward_list = sections.reward_list(profile)
    if not reward_list:
        reward_list = [
            Commented(
                {"verifier": sections.check_verified(profile, "rl")}, "1 for an answer that equals the label, else 0"
            )
        ]
    room = answer_room(profile)
    # A step of 32 answers of a model of 135M parameters takes two cores 20 to 30 s.
    per_step = 64 if profile.machine.gpus else 16 if profile.model.is_scratch else 4
    per_step = max(2, min(per_step, profile.rows.count // 4))
    prompts = sections.prompts(profile, profile.all_sources, room)
    rate = 5e-6 if (profile.model.parameters or SMALL) < SMALL else 1e-6
    train = sections.training(profile, rate, 2e-4, sections.sampled_tokens(profile, room, "rl"), shares=True)
    del train["num_train_epochs"]  # passes over the completions of a step: one
    train["batch_size"] = Commented(per_step * GENERATIONS, "completions in an optimiser step: all of a step")
    section = {
        "prompts": prompts,
        "steps": Commented(
            sections.steps(profile, per_step), f"each takes the next {per_step} of {profile.rows.count_in_words}"
        ),
        "prompts_per_step": per_step,
        "generation": sections.generation(GENERATIONS, room),
        "rewards": reward_list,
        "advantage": Commented({"estimator": "group", "scale_rewards": "group"}, "GRPO"),
        "training": {**train, "lr_scheduler_type": "constant"},
    }
    if profile.machine.gpus:
        correction = {"mode": "mask", "level": "sequence", "high": 3.0}
        section["importance_sampling_correction"] = Commented(correction, "as in TRL: engines round otherwise in bf16")
    evaluation = sections.evaluation(profile)
    if evaluation:
        evaluation["evaluation"]["generation"] |= sections.generation(1, room)
        evaluation["evaluation"]["prompts"] |= {"max_length": prompts["max_length"]}
    return {"rl": section, **evaluation}


def answer_room(profile: Profile) -> int:
    """Tokens of an answer that reasons before it ends."""
    if profile.model.is_scratch:
        return 32
    if profile.lengths.thinks:
        return sections.answer_room(profile)
    return min(512 if profile.machine.gpus else 256, max(16, (profile.model.context or 4096) // 2))


METHOD = Method(
    RlRecipe,
    compose,
    decides={
        "rl/prompts": "rl.prompts",
        "rl/pretraining": "rl.pretraining.data",
        "rl/held-out": "rl.best.prompts",
        r"rl/reward-\d+:.*": "rl.rewards",
        "rl/reference": "rl.kl.reference",
        "rl": "rl",
    },
    aliases=("ppo", "grpo", "rloo", "reinforce", "reinforce-baseline", "rlhf"),
    init=Init(
        kinds=("prompts",),
        sections=init_sections,
        why="prompts with a right answer each, which a verifier can compare with",
        rank=40,
        formats=("prompts",),
        fits=fits,
        others=("ppo", "rloo", "reinforce", "reinforce-baseline", "rlhf"),
        instead="`--method grpo` writes GRPO, `align init --from ppo` (or rlhf, reinforce-baseline) copies a recipe",
    ),
)
