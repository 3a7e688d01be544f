"""Sampling ahead of training: which draws a step takes, whatever is slow, and that each group goes on once."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.environments.episode import Episode
from alignment_core.rollout.async_sampler import AsyncSampler, choose


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


def test_a_group_goes_on_once_also_where_two_environments_end_its_last_episodes_at_a_time() -> None:
    # No engine: two threads that meet like this are a matter of chance.
    sampling: Any = SimpleNamespace(engines=SimpleNamespace(size=1), environments=None, draws=None)
    ahead = AsyncSampler(sampling, lambda rows: rows, prompts_per_step=2, steps=9, max_staleness=1, partial=True)
    group = [Episode(draw=7, sample=sample, number=0, prompt={}, most_tokens=8, over=True) for sample in range(2)]
    ahead._groups, ahead._under_way = {7: group}, [{episode.name: episode for episode in group}]
    ahead._answered(group[0])
    assert not ahead._sampled, "the other is over too, but its thread has not said so"
    ahead._answered(group[1])
    assert list(ahead._sampled) == [7]


class CountingRow(dict[str, Any]):
    """A row that counts how often its group is looked at."""

    looks = 0

    def __getitem__(self, name: str) -> Any:
        CountingRow.looks += name == "group"
        return super().__getitem__(name)


def test_rewarded_rows_reach_their_draws_in_one_pass() -> None:
    """60 draws of 4 rows: each row is looked at once, where a search for each draw looks 60 times at each."""
    rows = [CountingRow(group=draw, sample=sample) for sample in range(4) for draw in range(60)]
    sampling: Any = SimpleNamespace(
        engines=SimpleNamespace(size=1, timeout=20),
        environments=None,
        draws=None,
        rows=lambda _: rows,
        check=lambda: None,
    )
    ahead = AsyncSampler(sampling, lambda rows: rows, prompts_per_step=2, steps=9, max_staleness=1, partial=True)
    ahead._groups, CountingRow.looks = {draw: [] for draw in range(60)}, 0
    ahead._sampled.extend(range(60))
    thread = threading.Thread(target=ahead._ask_for_rewards)
    thread.start()
    with ahead._changed:
        ahead._wait_for(lambda: len(ahead._ready) == 60, "rewards")
    ahead.close()
    thread.join()
    assert CountingRow.looks == len(rows)
    assert ahead._ready[7] == [{"group": 7, "sample": sample} for sample in range(4)]
