"""Initial weights of a critic: only a reward model with the policy's tokenizer can be one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.execution.base import StageContext
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, RlConfig
from alignment_core.stages.rl.run import critic_of
from tests.rewards.other_tokenizer import reward_model_with_another_tokenizer
from tests.stages.rl_runs import section_of

PPO = {"advantage": {"estimator": "gae"}, "critic": {}}


def start_of(section: dict[str, Any], **models: Path) -> tuple[str | None, list[str]]:
    """The name of the folder that a critic starts from, and the warnings."""
    names = dict(zip(models, "abc", strict=False))
    context = StageContext(
        inputs=models,
        references={name: Reference("model", digit * 64) for name, digit in names.items()},
        outputs={},
        progress=Path(),
        seed=0,
        resources=ResourcesConfig(),
        machines=None,  # type: ignore[arg-type]
        reporter=lambda *_: None,
    )
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
