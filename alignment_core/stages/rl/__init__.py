"""Stage: reinforcement learning of a policy from its own samples.

A step samples the next prompts, rewards the completions, computes the advantage of each token, and trains on them; then
the engines get the new weights. A step depends only on its number and the weights, so that a run that was killed resumes from
its last checkpoint and ends with the same policy.
"""

from __future__ import annotations

from typing import Any

from alignment_core.artifacts.reference import MASTERS
from alignment_core.environments.environments import environment_content
from alignment_core.evaluation.metric_names import titles
from alignment_core.execution.base import SamplingPlan, Stage, StageConfig, StageContext
from alignment_core.execution.intermediate_checkpoints import CHECKPOINTS
from alignment_core.execution.packages import packages_of
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import REWARDS_FIELD, RlConfig
from alignment_core.rewards import base as reward_kinds

RESULTS = {"last": "policy", "average": "average", "best": "best"}
"""The output that is the run's policy, by ``rl.result``."""
OUTPUTS = {
    "policy": "model",
    "average": "model",
    "best": "model",
    "critic": "critic",
    ADAPTER: "adapter",  # of the policy after the last step
    "trajectories": "trajectories",
    MASTERS: MASTERS,  # of the policy after the last step
    CHECKPOINTS: "model",  # policies
}
SHOWS = titles("reward", "kl", "completion_length", "critic_loss")
"""The stage's key metrics."""


class RlStageConfig(StageConfig):
    """The recipe's section `rl`."""

    section: RlConfig

    def content(self) -> Any:
        inputs: dict[str, Any] = {
            "prompts": True,
            "pretraining": {"data"},
            "best": {"prompts"},
            "kl": {"reference"},
        }
        section = self.section.model_dump(mode="json", exclude={**inputs, "result": True})
        if self.section.environment:
            section["environment"] |= environment_content(self.section.environment)
        return section | {"rewards": reward_kinds.content(self.section.rewards, REWARDS_FIELD)}

    def sampling(self) -> SamplingPlan:
        section = self.section
        return SamplingPlan(section.generation, environment=section.environment, dtype=section.training.dtype)

    def rewarded(self) -> dict[str, RewardConfig]:
        return {f"{REWARDS_FIELD}.{number}": reward for number, reward in enumerate(self.section.rewards)}

    def code_used(self) -> tuple[str, ...]:
        return reward_kinds.code_used(self.section.rewards)

    def packages_used(self) -> tuple[str, ...]:
        return (*reward_kinds.packages_used(self.section.rewards), *packages_of(self.section.training))


def run(context: StageContext, config: RlStageConfig) -> dict[str, Any]:
    from alignment_core.stages.rl.run import run_section  # imports torch and vLLM

    return run_section(context, config.section, SHOWS)


PACKAGES = ("deepspeed", "tokenizers", "torch", "transformers", "vllm")
STAGE = Stage("rl", 4, OUTPUTS, RlStageConfig, run, SHOWS, packages=PACKAGES)
