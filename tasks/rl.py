"""Tasks of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes import RlConfig
from alignment_core.stages.rl import RESULTS, RlStageConfig


def rl(
    label: str,
    section: RlConfig,
    policy: Input,
    prompts: Input,
    reward_models: Mapping[str, Input],
    critic: Input | None,
    pretraining: Input | None,
    held_out: Input | None,
    reference: Input | None = None,
) -> Step:
    """Reward a policy for its own samples; returns the policy that ``rl.result`` chooses.

    ``reward_models`` are the reward models by role (``reward-<number>`` in ``section.rewards``); ``critic`` is where a critic
    starts, none meaning the policy; ``pretraining`` and ``held_out`` are the data sets of ``section.pretraining`` and
    ``section.best``, if it has them; ``reference`` is what the KL is measured to, none meaning the policy.
    """
    config = RlStageConfig(section=section)
    data = {"prompts": prompts, "pretraining": pretraining, "held_out": held_out}
    inputs = {"policy": policy, "critic": critic, "reference": reference, **data, **reward_models}
    return submit("rl", label, config, inputs).output(RESULTS[section.result])
