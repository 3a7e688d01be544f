"""Initial weights of a critic: only a reward model with the policy's tokenizer can be one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageContext
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, RlConfig
from alignment_core.stages.rl.rewards import Rewards
from alignment_core.stages.rl.run import critic_of, reward_of_critic
from tests.rewards.other_tokenizer import reward_model_with_another_tokenizer
from tests.rollout.rollouts import rollout
from tests.stages.rl_runs import section_of

PPO = {"advantage": {"estimator": "gae"}, "critic": {}}


def context_of(**models: Path) -> StageContext:
    names = dict(zip(models, "abc", strict=False))
    return StageContext(
        inputs=models,
        references={name: Reference("model", digit * 64) for name, digit in names.items()},
        outputs={},
        progress=Path(),
        seed=0,
        resources=ResourcesConfig(),
        machines=None,  # type: ignore[arg-type]
        reporter=lambda *_: None,
    )


def start_of(section: dict[str, Any], **models: Path) -> tuple[str | None, list[str]]:
    """The name of the folder that a critic starts from, and the warnings."""
    context = context_of(**models)
    warnings: list[str] = []
    config = RlConfig.model_validate(section_of(1, {"reward_model": "ours"}, **section))
    critic = critic_of(context, config, byte_tokenizer(), warnings)
    return critic.path.name if critic else None, warnings


@pytest.fixture
def policy(tiny_model: Any, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model(), tmp_path / "policy")


def test_a_critic_starts_at_a_reward_model_with_the_policys_tokenizer(policy: Path, tmp_path: Path) -> None:
    judge = shutil.copytree(policy, tmp_path / "judge")
    assert start_of(PPO, policy=policy, critic=judge) == ("judge", [])
    assert start_of(PPO, policy=policy) == ("policy", [])
    assert start_of({}, policy=policy, critic=judge) == (None, [])


def test_a_critic_does_not_start_at_a_reward_model_with_another_tokenizer(policy: Path, tmp_path: Path) -> None:
    judge = reward_model_with_another_tokenizer(tmp_path / "judge", policy)
    start, (warning,) = start_of(PPO, policy=policy, critic=judge)
    assert start == "policy"
    assert warning.startswith("rl.critic: model@sha256:bbbb")
    assert "another tokenizer than model@sha256:aaaa" in warning
    assert warning.endswith("so the critic is initialised from the policy, with a new head")


def test_its_units_are_those_of_the_first_reward_model_and_not_of_a_judge_before_that(
    policy: Path, tmp_path: Path
) -> None:
    judge = shutil.copytree(policy, tmp_path / "judge")
    listed = [{"served_judge": "judge/production"}, {"reward_model": "ours"}]
    config = RlConfig.model_validate({**section_of(1, {"verifier": "task"}, **PPO), "rewards": listed})
    context = context_of(policy=policy, critic=judge)
    assert reward_of_critic(context, config, context.model("critic")) == (1, (0.0, 1.0))


@pytest.mark.parametrize("normalise", ["none", "model", "running"])
def test_the_values_of_a_critic_have_the_units_of_the_reward_whose_model_it_starts_at(
    normalise: str, policy: Path, tmp_path: Path
) -> None:
    judge = shutil.copytree(policy, tmp_path / "judge")
    (judge / "rewards.json").write_text('{"mean": 1.5, "deviation": 4.0, "answers": 10}')
    listed = [{"verifier": "task"}, {"reward_model": "ours", "normalise": normalise}]
    config = RlConfig.model_validate({**section_of(1, {"verifier": "task"}, **PPO), "rewards": listed})
    context = context_of(policy=policy, critic=judge)
    spread = (1.5, 4.0) if normalise == "model" else (0.0, 1.0)
    of_critic = reward_of_critic(context, config, context.model("critic"))
    assert of_critic == (1, spread)
    assert reward_of_critic(context, config, context.model("policy")) is None, "with a new head"
    assert reward_of_critic(context, config, None) is None

    sources: Any = None  # the rewards are there already
    rewards = Rewards(config, sources, Stopwatch(), cost={}, of_critic=of_critic)
    scores = np.array([1.0, 5.0])
    given = (scores - spread[0]) / spread[1]
    rollouts = [rollout([True], rewards={"task": 0.0, "reward_model": reward}) for reward in given]
    totals = [row.reward for row in rewards.add_totals(rollouts)]
    zero, one = rewards.critic_units
    assert totals == pytest.approx(((scores - zero) / one).tolist(), rel=1e-3)
    assert Rewards(config, sources, Stopwatch(), cost={}).critic_units == (0.0, 1.0)
