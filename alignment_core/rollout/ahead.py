"""Sampling ahead of training: engines go on while the policy learns, by a bounded number of steps.

One thread drives each engine and one asks for rewards; who takes completions waits for what it needs. New weights reach
the engines between two of their steps. A group of completions that began under the weights of step v is trained on at
step v + ``max_staleness`` at the latest (the bound of Fu et al. 2025, "AReaL").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alignment_core.errors import DeadlineExceeded
from alignment_core.rollout.engine import MOST_SEQUENCES, Request
from alignment_core.rollout.episodes import Draws, Episode
from alignment_core.rollout.experience import Samples

SLICE_SECONDS = 0.1
"""Of sampling per call of an engine: what new weights may have to wait for."""
CLOSING_SECONDS = 1.0
"""How long a reward that is being given may delay the end."""


class Ahead:
    """Samples from the moment it is told which version the engines hold until it is closed."""

    def __init__(
        self,
        engines: Any,
        draws: Draws,
        tokenizer: Any,
        policy: str,
        reward: Callable[[Samples], Samples],
        wait: float,
        *,
        prompts_per_step: int,
        steps: int,
        max_staleness: int,
        partial: bool,
    ) -> None:
        """``policy`` is the reference of the policy before the first step; ``reward`` gives rows their rewards.

        With ``partial`` new weights reach completions under way, otherwise they wait for these.
        """
        self.engines, self.draws, self.tokenizer, self.policy = engines, draws, tokenizer, policy
        self.reward, self.wait = reward, wait
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
        self._under_way: list[dict[str, Episode]] = [{} for _ in range(engines.size)]
        self._groups: dict[int, list[Episode]] = {}
        """All episodes of the draws that are being sampled."""
        self._sampled: deque[int] = deque()
        """Draws whose completions wait for their rewards."""
        self._ready: dict[int, Samples] = {}
        self._busy: set[int] = set()
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
    def still(self, version: int) -> Iterator[None]:
        """The engines are the caller's meanwhile; afterwards they hold this version of the weights, and go on."""
        with self._changed:
            if not self.partial:
                self._draining = True
                self._wait_for(lambda: not any(self._under_way), "completions under way to end")
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
            self._wait_for(lambda: self._has(count), f"the completions of {count} prompts")
            due = self._due()
            chosen = due + [draw for draw in sorted(self._ready) if draw not in due][: count - len(due)]
            self._wanted = 0
            for draw in chosen:
                del self._began[draw]
            self._changed.notify_all()
            return [row for draw in sorted(chosen) for row in self._ready.pop(draw)]

    def _has(self, count: int) -> bool:
        return len(self._ready) >= count and all(draw in self._ready for draw in self._due())

    def _due(self) -> list[int]:
        """Draws that would be too stale for the step after this."""
        return [draw for draw, began in self._began.items() if began + self.max_staleness <= self.version]

    def _start(self) -> None:
        self.engines.all("drop_all", timeout=self.wait)  # what a run before this left under way
        tasks: list[Callable[[], None]] = [lambda n=n: self._serve(n) for n in range(self.engines.size)]  # type: ignore[misc]
        for task in (*tasks, self._ask_for_rewards):
            thread = threading.Thread(target=self._guarded, args=(task,), daemon=True)
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
        stop, generation = self.tokenizer.eos_token_id, self.draws.generation
        mine = self._under_way[engine]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (not self._held and (mine or self._may_draw())))
                if self._closed:
                    return
                fresh = self._draw(engine)
                self._busy.add(engine)
            try:
                done = self.engines.one(engine, "advance", fresh, generation, stop, SLICE_SECONDS, timeout=self.wait)
            finally:
                with self._changed:
                    self._busy.discard(engine)
                    self._changed.notify_all()
            with self._changed:
                for name, said in done:
                    mine.pop(name).take(said)
                ended = {int(name.partition("/")[0]) for name, _ in done}
                self._sampled += [draw for draw in sorted(ended) if self._is_whole(draw)]
                self._changed.notify_all()

    def _may_draw(self) -> int:
        """How many prompts may be drawn now."""
        if self._draining:
            return 0
        steps_ahead = min(self.max_staleness, self.steps - 1 - self.version)
        most = steps_ahead * self.prompts_per_step + self._wanted
        return max(len(self._again), most - len(self._began))

    def _draw(self, engine: int) -> list[Request]:
        """Requests for further prompts: this engine's share of those that may be drawn, as far as it has room."""
        mine, fresh = self._under_way[engine], []
        for _ in range(-(-self._may_draw() // self.engines.size)):
            if mine and len(mine) + self.draws.generation.num_generations > MOST_SEQUENCES:
                break
            if self._again:
                draw = self._again.popleft()
            else:
                draw, self.drawn = self.drawn, self.drawn + 1
            self._began[draw] = self.version
            self._groups[draw] = self.draws.episodes(draw)
            for episode in self._groups[draw]:
                mine[episode.name] = episode
                fresh.append(self.draws.request(episode))
        return fresh

    def _is_whole(self, draw: int) -> bool:
        return all(episode.finish_reason for episode in self._groups[draw])

    def _ask_for_rewards(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._sampled)
                if self._closed:
                    return
                groups = {draw: self._groups.pop(draw) for draw in self._sampled}
                self._sampled.clear()
            rows = [one.row(self.tokenizer, self.policy) for group in groups.values() for one in group]
            rewarded = self.reward(rows)
            with self._changed:
                for draw in groups:
                    self._ready[draw] = [row for row in rewarded if row["group"] == draw]
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held. Raises what went wrong in a thread, or DeadlineExceeded."""
        deadline = time.monotonic() + self.wait
        while not condition():
            if self._error:
                raise self._error
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and not condition():
                raise DeadlineExceeded(f"waited {self.wait:g} seconds for {what} (resources.wait_timeout_seconds)")

    def close(self) -> None:
        """End the threads; what is under way is lost, and its prompts are not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads[:-1]:
            thread.join()
        for thread in self._threads[-1:]:  # who gives rewards ends it when its sources are closed
            thread.join(CLOSING_SECONDS)
