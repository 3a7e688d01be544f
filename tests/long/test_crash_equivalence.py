"""A resumed run has the results of an undisturbed run, however and however often it was killed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.campaign import Campaign, campaign_of, summary
from tests.crash.replicas import Replica, replicas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = 20


@pytest.fixture(scope="module")
def rewarding() -> Iterator[Sequence[Replica]]:
    with replicas(2) as servers:
        yield servers


def check(campaign: Campaign, kills: int, measured: Any) -> None:
    """Kill so often, and see that nothing came out wrong."""
    lines: list[str] = []
    campaign.say = lines.append
    campaign.run(kills)
    measured(f"{summary(campaign.kills)}; seed {SEED}")
    assert campaign.differences == [], "\n".join(lines)


def test_killed_runs_give_the_digests_of_an_undisturbed_run(
    tmp_path: Path, prefect_api: dict[str, str], measured: Any
) -> None:
    """`python -m tests.crash --kills 100` does the same with any number of kills."""
    campaign = campaign_of("quickstart", tmp_path, random.Random(SEED))
    campaign.environment = prefect_api
    campaign.undisturbed()
    check(campaign, 25, measured)
    assert len({kill.role for kill in campaign.kills}) >= 4


def test_killed_reinforcement_learning_gives_that_policy_in_step_and_takes_each_prompt_once_ahead_of_training(
    tmp_path: Path, rewarding: Sequence[Replica], prefect_api: dict[str, str], measured: Any
) -> None:
    """`python -m tests.crash --recipe rl --begins-at rl`, and `--recipe rl-ahead`, with as many kills as you like."""
    rng = random.Random(SEED)
    in_step = campaign_of("rl", tmp_path / "in-step", rng, rewarding)
    ahead = campaign_of("rl-ahead", tmp_path / "ahead", rng, rewarding)
    in_step.environment = ahead.environment = prefect_api
    in_step.undisturbed()
    ahead.expected = in_step.expected  # up to the rl stage
    for campaign, kills in ((in_step, 6), (ahead, 4)):
        campaign.begins_at, campaign.longest_pause = "rl", 5.0
        check(campaign, kills, measured)
