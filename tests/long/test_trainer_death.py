"""A trainer that dies while engines sample ahead of it. (The death of an engine is in `make test`.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stages.conftest import RunRl, resources, run
from tests.stages.rl_runs import Section
from tests.stages.test_rl_ahead import check_that_nothing_is_lost_by_a_death, section

__all__ = ["resources", "run", "section"]

pytestmark = pytest.mark.slow


def test_after_the_death_of_a_trainer_no_prompt_is_lost_or_taken_twice(
    section: Section, machines: Any, run: RunRl
) -> None:
    check_that_nothing_is_lost_by_a_death("trainers", section, machines, run)
