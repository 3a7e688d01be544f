"""However a run is killed, and however often: resumed, it gives what it would have given undisturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.crash.campaign import Campaign, prefect_server, summary
from tests.crash.recipe import COMMAND

KILLS, SEED = 25, 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_runs_give_the_digests_of_an_undisturbed_one(tmp_path: Path, measured: Any) -> None:
    """`python -m tests.crash --kills 100` does the same with any number of kills."""
    said: list[str] = []
    with prefect_server(tmp_path / "server"):
        campaign = Campaign(tmp_path, COMMAND, random.Random(SEED), said.append)
        campaign.undisturbed()
        campaign.run(KILLS)
    measured(f"{summary(campaign.kills)}; seed {SEED}")
    assert campaign.differences == [], "\n".join(said)
    assert len({kill.role for kill in campaign.kills}) >= 4
