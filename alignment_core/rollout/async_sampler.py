"""Sampling ahead of training: engines keep sampling while the policy trains, a bounded number of steps ahead.

One thread drives each engine, one each process of environments, and one asks for rewards; who takes completions waits for
what it needs. New weights reach the engines between two of their steps. A group of completions that began under the weights
of step v is trained on at step v + ``max_staleness`` at the latest (the bound of Fu et al. 2025, "AReaL").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from alignment_core.environments.episode import Episode
from alignment_core.errors import DeadlineExceeded
from alignment_core.inference.engine import MOST_SEQUENCES
from alignment_core.rollout.advantages import Samples
from alignment_core.rollout.sampling import Sampling

SLICE_SECONDS = 0.1
"""Of sampling per call of an engine: what new weights may have to wait for."""
THREADS = "ahead: "
"""What the names of all threads begin with."""
CLOSING_SECONDS = 1.0
"""How long what is under way may delay the end: an engine that hangs, a reward or an answer that is being given."""
STOPPING_SECONDS = 0.2
"""How long a wait goes on when the run is being stopped."""


def choose(last: Mapping[int, int], ready: Container[int], step: int, count: int, per_step: int) -> list[int] | None:
    """The ``count`` draws that a step takes, None while some of them are not ready.

    First those without which a later step would be left with more than ``per_step`` that can wait no longer, then the
    earliest that are ready. Args: ``last`` the last step that may take each draw, in the order in which they were drawn.
    """
    urgent = sorted(last, key=lambda draw: (last[draw], draw))
    must = 0
    for number, draw in enumerate(urgent, start=1):
        must = max(must, number - (last[draw] - step) * per_step)
    chosen = urgent[:must]
    if not all(draw in ready for draw in chosen):
        return None
    others = [draw for draw in sorted(urgent[must:]) if draw in ready][: max(0, count - must)]
    return chosen + others if must + len(others) >= count else None


class AsyncSampler:
    """Samples from when it is told which version the engines hold until it is closed."""

    def __init__(
        self,
        sampling: Sampling,
        reward: Callable[[Samples], Samples],
        *,
        prompts_per_step: int,
        steps: int,
        max_staleness: int,
        partial: bool,
    ) -> None:
        """``reward`` gives rows their rewards. With ``partial`` new weights reach completions under way, otherwise they wait
        for these."""
        self.sampling, self.reward = sampling, reward
        self.engines, self.environments, self.draws = sampling.engines, sampling.environments, sampling.draws
        self.prompts_per_step, self.steps = prompts_per_step, steps
        self.max_staleness, self.partial = max_staleness, partial
        self.drawn, self.version = 0, 0
        self._changed = threading.Condition()
        self._wanted = prompts_per_step
        """Prompts that the step that is on still takes."""
        self._began: dict[int, int] = {}
        """Draws that were not taken yet, and the version that each began with."""
        self._again: deque[int] = deque()
        """Draws of a run that went on which are to be sampled once more."""
        self._under_way: list[dict[str, Episode]] = [{} for _ in range(self.engines.size)]
        """By engine: episodes that are not over."""
        self._to_sample: list[deque[Episode]] = [deque() for _ in range(self.engines.size)]
        """By engine: episodes whose policy is to say something next."""
        self._sampling: list[set[str]] = [set() for _ in range(self.engines.size)]
        """By engine: names of the episodes that it samples."""
        self._to_answer: list[deque[Episode]] = [
            deque() for _ in range(self.environments.size if self.environments else 0)
        ]
        """By process of environments: episodes whose environment is to answer."""
        self._groups: dict[int, list[Episode]] = {}
        """All episodes of the draws that are being sampled."""
        self._sampled: deque[int] = deque()
        """Draws whose completions wait for their rewards."""
        self._ready: dict[int, Samples] = {}
        self._busy: set[int] = set()
        """Engines that a thread waits for."""
        self._answering: set[int] = set()
        """Processes of environments that a thread talks to."""
        self._held = self._draining = self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on needs to know: what it draws next, and which draws it has not trained on."""
        with self._changed:
            return {"drawn": self.drawn, "pending": sorted(self._began) + list(self._again)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a run was; call it before the first :meth:`still`."""
        self.drawn = state["drawn"]
        self._again = deque(state["pending"])

    @contextmanager
    def still(self, version: int, empty: bool = False) -> Iterator[None]:
        """The engines are the caller's meanwhile; afterwards they hold this version of the weights, and go on.

        With ``empty`` no completion is under way in them.
        """
        with self._changed:
            if empty or not self.partial:
                self._draining = True
                self._wait_for(lambda: not (any(self._under_way) or self._answering), "completions under way to end")
            self._held = True
            self._wait_for(lambda: not self._busy, "engines to pause")
        yield
        with self._changed:
            self._held = self._draining = False
            self.version, self._wanted = version, self.prompts_per_step
            self._changed.notify_all()
        if not self._threads:
            self._start()

    def take(self, count: int) -> Samples:
        """Rewarded completions of ``count`` prompts: those that can wait no longer, then the earliest that are done."""
        with self._changed:
            self._wanted = count
            self._changed.notify_all()
            self._wait_for(lambda: self._chosen(count) is not None, f"the completions of {count} prompts")
            chosen = self._chosen(count) or []
            self._wanted = 0
            for draw in chosen:
                del self._began[draw]
            self._changed.notify_all()
            return [row for draw in sorted(chosen) for row in self._ready.pop(draw)]

    def rest(self) -> None:
        """Its engines go on."""

    def _chosen(self, count: int) -> list[int] | None:
        last = {draw: began + self.max_staleness for draw, began in self._began.items()}
        return choose(last, self._ready, self.version, count, self.prompts_per_step)

    def _start(self) -> None:
        self.engines.drop_all()  # what a run before this left under way
        tasks: dict[str, Callable[[], None]] = {"rewards": self._ask_for_rewards}
        tasks |= {f"engine {number}": partial(self._serve, number) for number in range(self.engines.size)}
        tasks |= {
            f"environments {process}": partial(self._let_answer, process) for process in range(len(self._to_answer))
        }
        for name, task in tasks.items():
            thread = threading.Thread(target=self._guarded, args=(task,), name=f"{THREADS}{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, task: Callable[[], None]) -> None:
        """A failure of a thread is the failure of whoever waits."""
        try:
            task()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _serve(self, engine: int) -> None:
        """Keep one engine at work."""
        stop_ids, generation = self.sampling.stop_ids, self.draws.generation
        to_sample, sampling = self._to_sample[engine], self._sampling[engine]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (not self._held and self._has_work(engine)))
                if self._closed:
                    return
                self._draw(engine)
                fresh = [self.draws.request(episode) for episode in to_sample]
                to_sample.clear()
                sampling |= {request.name for request in fresh}
                self._busy.add(engine)
            try:
                done = self.engines.advance(engine, fresh, generation, stop_ids, SLICE_SECONDS)
            finally:
                with self._changed:
                    self._busy.discard(engine)
                    self._changed.notify_all()
            with self._changed:
                for name, completion in done:
                    sampling.remove(name)
                    episode = self._under_way[engine][name]
                    episode.take(completion)
                    self._next(episode, engine)
                self._changed.notify_all()

    def _has_work(self, engine: int) -> bool:
        return bool(self._sampling[engine] or self._to_sample[engine]) or self._can_draw(engine)

    def _next(self, episode: Episode, engine: int) -> None:
        """An engine completed a turn of the policy in this episode."""
        if self.environments:
            self._to_answer[self.environments.process_of(episode)].append(episode)
        else:
            self._end(episode, engine)

    def _end(self, episode: Episode, engine: int) -> None:
        """This episode is over; the last of its group sends the group on. (One may be ``over`` before its thread says so.)"""
        mine = self._under_way[engine]
        del mine[episode.name]
        if not any(one.name in mine for one in self._groups[episode.draw]):
            self._sampled.append(episode.draw)

    def _let_answer(self, process: int) -> None:
        """Keep the environments of one process at work."""
        assert self.environments
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._to_answer[process]))
                if self._closed:
                    return
                episodes = list(self._to_answer[process])
                self._to_answer[process].clear()
                self._answering.add(process)
            try:
                for episode in self.environments.answer(episodes, process):
                    self._answered(episode)
            finally:
                with self._changed:
                    self._answering.discard(process)
                    self._changed.notify_all()

    def _answered(self, episode: Episode) -> None:
        with self._changed:
            engine = next(number for number, mine in enumerate(self._under_way) if episode.name in mine)
            if episode.over:
                self._end(episode, engine)
            else:
                self._to_sample[engine].append(episode)
            self._changed.notify_all()

    def _may_draw(self) -> int:
        """How many prompts may be drawn now."""
        if self._draining:
            return 0
        steps_ahead = min(self.max_staleness, self.steps - 1 - self.version)
        most = steps_ahead * self.prompts_per_step + self._wanted
        return max(len(self._again), most - len(self._began))

    def _can_draw(self, engine: int) -> bool:
        mine = len(self._under_way[engine])
        has_room = not mine or mine + self.draws.generation.num_generations <= MOST_SEQUENCES
        return has_room and self._may_draw() > 0

    def _draw(self, engine: int) -> None:
        """Begin further prompts: this engine's share of those that may be drawn, as far as it has room."""
        mine = self._under_way[engine]
        for _ in range(-(-self._may_draw() // self.engines.size)):
            if not self._can_draw(engine):
                return
            if self._again:
                draw = self._again.popleft()
            else:
                draw, self.drawn = self.drawn, self.drawn + 1
            self._began[draw] = self.version
            self._groups[draw] = self.draws.episodes(draw)
            for episode in self._groups[draw]:
                mine[episode.name] = episode
                if self.environments:
                    self._to_answer[self.environments.process_of(episode)].append(episode)
                else:
                    self._to_sample[engine].append(episode)
            self._changed.notify_all()

    def _ask_for_rewards(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._sampled)
                if self._closed:
                    return
                groups = {draw: self._groups.pop(draw) for draw in self._sampled}
                self._sampled.clear()
            rows = self.sampling.rows([episode for group in groups.values() for episode in group])
            rewarded: dict[int, Samples] = {draw: [] for draw in groups}
            for row in self.reward(rows):
                rewarded[row["group"]].append(row)
            with self._changed:
                self._ready |= rewarded
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held. Raises what went wrong in a thread, Stopped, or DeadlineExceeded."""
        deadline = time.monotonic() + self.engines.timeout
        while not condition():
            if self._error:
                raise self._error
            self.sampling.check()
            self._changed.wait(STOPPING_SECONDS)
            if time.monotonic() > deadline and not condition():
                raise DeadlineExceeded(
                    f"waited {self.engines.timeout:g} seconds for {what} (resources.wait_timeout_seconds)"
                )

    def close(self) -> None:
        """End the threads; what is under way is lost, and its prompts are not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:  # what is left ends with the processes that it waits for
            thread.join(max(0.0, deadline - time.monotonic()))
