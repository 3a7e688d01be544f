"""Sampling ahead of training: how stale completions may be, which weights made them, and no prompt lost or taken twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.errors import DataError
from tests.stages.conftest import RunRl
from tests.stages.killing import Killer
from tests.stages.rl_runs import GENERATIONS, PROMPTS, Section, section_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 6
SCORES = """
import time

calls = 0

def slowly(prompt, completion, label):
    time.sleep(0.002)
    return sum(c.islower() for c in completion) / max(1, len(completion))

def breaks_down(prompt, completion, label):
    global calls
    calls += 1
    if calls > 6:
        raise ValueError("cannot judge any more")
    return 0.5
"""


@pytest.fixture
def section(tmp_path: Path) -> Section:
    (tmp_path / "scores.py").write_text(SCORES)
    reward = {"verifier": f"{tmp_path / 'scores.py'}:slowly"}
    return section_of(
        STEPS, reward, {"max_completion_length": 100}, {"learning_rate": 1e-4}, execution={"max_staleness": 1}
    )


def check_that_each_prompt_was_taken_once(steps: list[list[dict[str, Any]]], staleness: int) -> None:
    drawn = [row["group"] for rows in steps for row in rows]
    counted = dict(zip(*np.unique(drawn, return_counts=True), strict=True))
    assert set(counted.values()) == {GENERATIONS}, "none was taken twice, and none in part"
    assert max(counted) - len(counted) < (1 + staleness) * PROMPTS, "those left out are no more than may be under way"


@pytest.mark.parametrize(("staleness", "partial"), [(1, True), (2, True), (1, False)])
def test_completions_are_as_stale_as_the_recipe_allows_and_no_more(
    staleness: int, partial: bool, section: Section, run: RunRl
) -> None:
    section["execution"] = {"max_staleness": staleness, "partial_rollouts": partial}
    section["filter"] = {"low": 0.0, "high": 0.5, "max_refills": 2}
    outputs, result = run(section)
    steps = steps_of(outputs)
    check_that_each_prompt_was_taken_once(steps, staleness)
    stale = [step - np.asarray(row["versions"]) for step, rows in enumerate(steps) for row in rows]
    assert max(int(ages.max()) for ages in stale) == staleness
    assert min(int(ages.min()) for ages in stale) >= 0
    if not partial:
        assert all(len(set(ages.tolist())) == 1 for ages in stale), "a completion has one policy"
    assert 0 < result.metrics["staleness"] <= staleness


def check_that_nothing_is_lost_by_a_death(group: str, section: Section, machines: Any, run: RunRl) -> None:
    """No prompt is lost or taken twice when an actor of this group dies."""
    killer = Killer(machines(2), group, at=3)
    outputs, result = run(section, reporter=killer)
    assert result.cost["restarts"] == 1
    assert killer.done[:4] == [0, 1, 2, 3]
    # From the checkpoint after step 3, or after step 4, if its completions were there before the death.
    assert killer.done[4:] in ([3, 4, 5, 6], [4, 5, 6])
    steps = steps_of(outputs)
    assert len(steps) == STEPS
    check_that_each_prompt_was_taken_once(steps, staleness=1)
    assert max(step - min(row["versions"]) for step, rows in enumerate(steps) for row in rows) == 1


def test_after_the_death_of_an_engine_no_prompt_is_lost_or_taken_twice(
    section: Section, machines: Any, run: RunRl
) -> None:
    """`make test-long` kills a trainer."""
    check_that_nothing_is_lost_by_a_death("engines", section, machines, run)


def test_an_error_in_the_background_sampler_ends_the_run(section: Section, tmp_path: Path, run: RunRl) -> None:
    section["rewards"][0]["verifier"] = f"{tmp_path / 'scores.py'}:breaks_down"
    with pytest.raises(DataError, match="cannot judge any more"):
        run(section)
