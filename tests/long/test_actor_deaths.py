"""The death of an actor that may not restart. (Restarts are in `make test`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from alignment_core.errors import RestartsExhausted
from tests.stages.conftest import actors
from tests.stages.killing import Killer
from tests.stages.test_rl_endings import resources, run, section

__all__ = ["actors", "resources", "run", "section"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dies", "stays"), [("engines", "trainers"), ("trainers", "engines")])
def test_the_death_of_an_actor_ends_the_run_and_its_own_group_alone(
    dies: str, stays: str, run: Callable[..., Any], actors: Any, machines: Any
) -> None:
    before = actors()
    with pytest.raises(RestartsExhausted):
        run(Killer(machines(2), dies, at=2))
    assert actors() == {stays: before[stays]}
