"""Stage: reinforcement learning of a policy from its own samples.

A step samples the next prompts, rewards the completions, computes the advantage of each token, and trains on them; then
the engines take the new weights. What a step does follows from its number and the weights alone: a run that was killed
goes on from its last checkpoint to the same policy.
"""

from __future__ import annotations

from typing import Any

from alignment_core.environments.environments import environment_content
from alignment_core.execution.base import SamplingPlan, Stage, StageConfig, StageContext, below
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


CODE = (
    "alignment_core.columns",
    *below("alignment_core.data", "completion_text context message_fields messages row_order template turn_end"),
    *below("alignment_core.environments", "agents calling calls environments episode tool_calls"),
    "alignment_core.execution.course",
    "alignment_core.files",
    *below("alignment_core.inference", "engine engines options weights"),
    *below("alignment_core.losses", "advantages kl logprobs mismatch policy"),
    "alignment_core.memory",
    "alignment_core.spool",
    *below(
        "alignment_core.models",
        "adapters attention buckets flex_trees four_bits handle loading microbatch packed padding prefix_tree rope",
        "same_tokenizer saving stop_tokens",
    ),
    *below("alignment_core.rewards", "base failures judges named sources totals verify"),
    *below("alignment_core.rollout", "ahead episodes experience in_step lengths records sampling"),
    *below("alignment_core.stages.rl", "best driver names reward_metrics rewarding session trajectories values"),
    *below(
        "alignment_core.training",
        "average batches checkpoints engine forward learner moving_reference optimizers policy_ranks portable pretraining",
        "ranks reinforcement resumable schedule step_data trainers training_rows worker",
    ),
    *below("alignment_core.training.methods", "sft"),
    *below("alignment_core.user_code", "conventions failed functions pool process"),
)
PACKAGES = ("deepspeed", "tokenizers", "torch", "transformers", "vllm")
STAGE = Stage("rl", 4, OUTPUTS, RlStageConfig, run, SHOWS, code=CODE, packages=PACKAGES)
