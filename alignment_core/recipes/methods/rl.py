"""The method ``rl``: reinforcement learning."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class RlRecipe(BaseRecipe):
    """SFT → steps of sample, reward, train → evaluation → promotion."""

    method: Literal["rl"] = "rl"
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their relatives."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model that `rl.rewards` and `evaluation.rewards` refer to as `ours`; a critic is initialised from it,
    too."""
    rl: RlConfig
    """The steps."""

    @property
    def samples(self) -> bool:
        """Every step does."""
        return True

    @model_validator(mode="after")
    def _has_its_rewards(self) -> RlRecipe:
        if self.reward_model:
            self.reward_model.check_origin()
        self.check_ours(self.rl.rewards, "rl.rewards")
        self.check_used(self.rl.rewards, "rl.rewards")
        best = self.rl.best.prompts if self.rl.best else None
        for reward in self.rl.rewards:
            reward.check(self.rl.prompts, "rl.prompts")
            if best is not None:
                reward.check(best, "rl.best.prompts")
        return self

    @model_validator(mode="after")
    def _fits_into_engines(self) -> RlRecipe:
        lora, most = self.rl.training.lora, self.resources.max_lora_rank
        if lora and most is not None and lora.is_addable and lora.r > most:
            raise ValueError(
                f"`rl.training.lora.r` is {lora.r}, above `resources.max_lora_rank` {most}: raise that, or leave it out, so "
                "that engines get merged weights"
            )
        return self


METHOD = Method(
    RlRecipe,
    composition="alignment.flows.rl:rl",
    decides={
        "rl/prompts": "rl.prompts",
        "rl/pretraining": "rl.pretraining.data",
        "rl/held-out": "rl.best.prompts",
        r"rl/reward-\d+:.*": "rl.rewards",
        "rl/reference": "rl.kl.reference",
        "rl": "rl",
    },
    aliases=("ppo", "grpo", "rloo", "reinforce", "reinforce-baseline", "rlhf"),
)
