"""Stage: reinforcement learning of a policy from its own samples.

A step samples the next prompts, rewards the completions, computes the advantage of each token, and trains on them; then
the engines take the new weights. What a step does follows from its number and the weights alone: a run that was killed
goes on from its last checkpoint to the same policy.
"""

from __future__ import annotations

from typing import Any

from alignment_core.environments.environments import environment_content
from alignment_core.execution.base import SamplingPlan, Stage, StageConfig, StageContext
from alignment_core.execution.packages import packages_of
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.rewards import base as rewards
from alignment_core.stages.rl.names import AVERAGE, BEST, CRITIC, FIELD, POLICY, SHOWS, TRAJECTORIES

RESULTS = {"last": POLICY, "average": AVERAGE, "best": BEST}
"""The output that is the run's policy, by ``rl.result``."""
OUTPUTS = {
    POLICY: "model",
    AVERAGE: "model",
    BEST: "model",
    CRITIC: "critic",
    ADAPTER: "adapter",  # of the policy after the last step
    TRAJECTORIES: "trajectories",
}


class RlStageConfig(StageConfig):
    """How to learn, and what rewards."""

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
        return section | {"rewards": rewards.content(self.section.rewards, FIELD)}

    def sampling(self) -> SamplingPlan:
        return SamplingPlan(self.section.generation, environment=self.section.environment)

    def rewarded(self) -> dict[str, RewardConfig]:
        return {f"{FIELD}.{number}": reward for number, reward in enumerate(self.section.rewards)}

    def code_used(self) -> tuple[str, ...]:
        return rewards.code_used(self.section.rewards)

    def packages_used(self) -> tuple[str, ...]:
        return (*rewards.packages_used(self.section.rewards), *packages_of(self.section.training))


def run(context: StageContext, config: RlStageConfig) -> dict[str, Any]:
    from alignment_core.stages.rl.session import run  # which imports what trains

    return run(context, config.section)


PACKAGES = ("deepspeed", "tokenizers", "torch", "transformers", "vllm")
STAGE = Stage("rl", 4, OUTPUTS, RlStageConfig, run, SHOWS, packages=PACKAGES)
