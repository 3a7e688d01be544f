"""Sampling ahead of training: which draws a step takes if some are slow, and each group continues once."""

from __future__ import annotations

import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.environments.episode import Episode
from alignment_core.rollout.async_sampler import AsyncSampler
from alignment_core.rollout.async_schedule import AsyncSchedule, choose


def test_a_step_takes_the_earliest_that_are_ready() -> None:
    last = {4: 7, 5: 7, 6: 7, 7: 7}
    assert choose(last, {5, 7, 6}, step=5, count=2, per_step=2) == [5, 6]
    assert choose(last, {5}, step=5, count=2, per_step=2) is None


def test_a_draw_that_can_wait_no_longer_is_waited_for() -> None:
    last = {4: 5, 5: 6, 6: 6}
    assert choose(last, {5, 6}, step=5, count=2, per_step=2) is None
    assert choose(last, {4, 5, 6}, step=5, count=2, per_step=2) == [4, 5]


def test_no_later_step_is_left_with_more_draws_than_fit() -> None:
    last = {4: 6, 5: 6, 6: 6, 7: 7, 8: 7}  # of three that step 6 takes at the latest it can take but two
    assert choose(last, {7, 8}, step=5, count=2, per_step=2) is None
    assert choose(last, {4, 7, 8}, step=5, count=2, per_step=2) == [4, 7]


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_no_step_takes_too_many_or_stale_draws_despite_slow_prompts(staleness: int) -> None:
    random.seed(staleness)
    per_step, last, ready, drawn, taken = 4, dict[int, int](), set[int](), 0, list[int]()
    for step in range(200):
        while len(last) < (1 + staleness) * per_step:
            last[drawn] = step + staleness
            drawn += 1
        chosen = None
        while chosen is None:
            waiting = [draw for draw in last if draw not in ready]
            # every seventh prompt is extremely slow: it is done once no other is left to wait for
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


def schedule() -> AsyncSchedule:
    """Of one engine without environments, which samples nothing here."""
    prompts: Any = None
    return AsyncSchedule(prompts, 1, None, prompts_per_step=2, steps=9, max_staleness=1, max_num_seqs=256)


def test_a_group_is_complete_once_even_if_two_environments_end_its_last_episodes_at_the_same_time() -> None:
    # No engine: two threads that meet like this are a matter of chance.
    group = [Episode(draw=7, sample=sample, number=0, prompt={}, most_tokens=8, over=True) for sample in range(2)]
    two = schedule()
    two.groups = {7: group}
    two.engines[0].episodes = {episode.name: episode for episode in group}
    two.add_answer(group[0])
    assert not two.complete, "the other is over too, but its thread has not reported it"
    assert not two.is_empty
    two.add_answer(group[1])
    assert two.complete == [7]
    assert two.is_empty
    assert two.next_to_reward() == {7: group}
    assert not two.complete


class CountingRollout:
    """A rollout that counts how often its group is read."""

    reads = 0

    def __init__(self, group: int, sample: int) -> None:
        self._group = group
        self.sample = sample

    @property
    def group(self) -> int:
        CountingRollout.reads += 1
        return self._group


def test_rewarded_rollouts_reach_their_draws_in_one_pass() -> None:
    """60 draws of 4 rollouts: each is read once, where a search for each draw would read each of them 60 times."""
    rollouts: Any = [CountingRollout(draw, sample) for sample in range(4) for draw in range(60)]
    sampling: Any = SimpleNamespace(
        engines=SimpleNamespace(size=1, timeout=20),
        environments=None,
        schedule=None,
        rollouts=lambda _: rollouts,
        check=lambda: None,
    )
    sampler = AsyncSampler(
        sampling,
        lambda rewarded: rewarded,
        prompts_per_step=2,
        steps=9,
        max_staleness=1,
        partial_rollouts=True,
        max_num_seqs=256,
    )
    CountingRollout.reads = 0
    sampler.schedule.groups = {draw: [] for draw in range(60)}
    sampler.schedule.complete.extend(range(60))
    thread = threading.Thread(target=sampler._reward_groups)
    thread.start()
    with sampler._changed:
        sampler._wait_for(lambda: len(sampler.schedule.ready) == 60, "rewards")
    sampler.close()
    thread.join()
    assert CountingRollout.reads == len(rollouts)
    assert [rollout.sample for rollout in sampler.schedule.ready[7]] == [0, 1, 2, 3]


class Busy:
    """A schedule whose engine always has work, up to the end of ``most`` calls."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.turns: list[str] = []

    def has_work(self, _engine: int) -> bool:
        return self.left > 0

    def next_requests(self, _engine: int) -> list[int]:
        self.left -= 1
        return [self.left]

    def add_turn(self, _engine: int, name: str, _completion: Any) -> None:
        self.turns.append(name)


def test_an_engine_has_its_next_call_before_the_result_of_the_last_one_is_read() -> None:
    """Without it, a GPU would wait for this process and the way to it and back after each slice of 50 ms."""
    events: list[str] = []

    def start(_engine: int, _method: Any, requests: list[int], *_: Any) -> Any:
        events.append(f"start {requests[0]}")

        def result() -> list[tuple[str, None]]:
            events.append(f"read {requests[0]}")
            if requests[0] == 0:
                sampler._closed = True
            return [(str(requests[0]), None)]

        return result

    engines = SimpleNamespace(size=1, timeout=20, start=start)
    prompts = SimpleNamespace(generation=None)
    sampling: Any = SimpleNamespace(
        engines=engines, environments=None, schedule=prompts, stop_ids=[], decoding=None, check=None
    )
    sampler = AsyncSampler(
        sampling, list, prompts_per_step=1, steps=1, max_staleness=1, partial_rollouts=True, max_num_seqs=1
    )
    busy: Any = Busy(3)
    sampler.schedule = busy
    sampler._run_engine(0)
    assert events == ["start 2", "start 1", "read 2", "start 0", "read 1", "read 0"]
    assert busy.turns == ["2", "1", "0"]
    assert not sampler._busy_engines


def test_draws_not_yet_trained_on_are_drawn_first_after_a_resume() -> None:
    before = schedule()
    before.drawn = 6
    before.began = {2: 0, 5: 1}
    resumed = schedule()
    resumed.restore(json.loads(json.dumps(before.state)))
    assert [resumed._next_draw() for _ in range(4)] == [2, 5, 6, 7]
