"""Which draws a step takes when sampling runs ahead: as many as it asks for, none too late, whatever is slow."""

from __future__ import annotations

import random

import pytest

from alignment_core.rollout.ahead import choose


def test_a_step_takes_the_earliest_that_are_ready() -> None:
    last = {4: 7, 5: 7, 6: 7, 7: 7}
    assert choose(last, {5, 7, 6}, step=5, count=2, per_step=2) == [5, 6]
    assert choose(last, {5}, step=5, count=2, per_step=2) is None


def test_a_draw_that_can_wait_no_longer_is_waited_for() -> None:
    last = {4: 5, 5: 6, 6: 6}
    assert choose(last, {5, 6}, step=5, count=2, per_step=2) is None
    assert choose(last, {4, 5, 6}, step=5, count=2, per_step=2) == [4, 5]


def test_a_later_step_is_not_left_with_more_than_it_takes() -> None:
    last = {4: 6, 5: 6, 6: 6, 7: 7, 8: 7}  # of three that step 6 takes at the latest it can take but two
    assert choose(last, {7, 8}, step=5, count=2, per_step=2) is None
    assert choose(last, {4, 7, 8}, step=5, count=2, per_step=2) == [4, 7]


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_however_slow_some_are_no_step_takes_more_than_it_asked_for_and_none_comes_late(staleness: int) -> None:
    random.seed(staleness)
    per_step, last, ready, drawn, taken = 4, dict[int, int](), set[int](), 0, list[int]()
    for step in range(200):
        while len(last) < (1 + staleness) * per_step:
            last[drawn] = step + staleness
            drawn += 1
        chosen = None
        while chosen is None:
            waiting = [draw for draw in last if draw not in ready]
            # every seventh prompt takes for ever: it is done once nothing else is left to wait for
            quick = [draw for draw in waiting if draw % 7] or waiting
            ready.add(random.choice(quick))
            chosen = choose(last, ready, step, per_step, per_step)
        assert len(chosen) == per_step
        assert all(last[draw] >= step for draw in chosen)
        for draw in chosen:
            del last[draw]
            ready.remove(draw)
        taken += chosen
    assert len(set(taken)) == len(taken) == 200 * per_step
