"""An engine that dies while episodes of an environment are under way. (Its death beside other rewards is in `make test`.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.stages.conftest import RunRl, run
from tests.stages.killing import Killer
from tests.stages.rl_runs import Section
from tests.stages.test_rl_environments import resources, section

__all__ = ["resources", "run", "section"]

pytestmark = pytest.mark.slow


def test_after_the_death_of_an_engine_the_policy_is_that_of_an_undisturbed_run(
    section: Section, machines: Any, run: RunRl
) -> None:
    _, first = run(section, "whole")
    killer = Killer(machines(2), "engines", at=1)
    _, killed = run(section, "killed", reporter=killer)
    assert killed.cost["restarts"] == 1
    assert killed.outputs == first.outputs
