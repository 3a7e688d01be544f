"""The scheduling priority of actors."""

from __future__ import annotations

import os
from typing import Any

import pytest

from alignment_core.cluster.device import Place
from alignment_core.cluster.group import ActorGroup


@pytest.mark.slow
def test_actors_run_at_the_priority_of_their_starting_process(machines: Any) -> None:
    """Ray starts actors at nice 15 by default. Linux weighs nice 0 with 1024 and nice 15 with 36 (``sched_prio_to_weight`` in
    the kernel), so that beside one other busy process such an actor has 36 / 1060 = 3 % of a core instead of a half."""
    group: ActorGroup[Any] = ActorGroup(machines(1).actors.connect(), "actors", [Place()], [{}], 60)
    try:
        niceness = group.ray.get(group.actors[0].__ray_call__.remote(lambda _: os.nice(0)))
        assert niceness == os.nice(0)
    finally:
        group.kill()
