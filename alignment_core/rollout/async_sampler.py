"""Sampling ahead of training: engines keep sampling while the policy trains, a bounded number of steps ahead.

One thread drives each engine, one each process of environments, and one the rewards; the caller waits for the completions that
it needs. New weights reach the engines between two of their calls. A group of completions that began with the weights of step
v is trained on at step v + ``max_staleness`` at the latest (the bound of Fu et al. 2025, "AReaL").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from alignment_core.errors import DeadlineExceeded
from alignment_core.inference.completions import Completion
from alignment_core.inference.engine import Engine
from alignment_core.rollout.async_schedule import AsyncSchedule
from alignment_core.rollout.rollout import Rollout
from alignment_core.rollout.sampling import Sampling

SLICE_SECONDS = 0.05
"""Duration of one sampling call of an engine."""
CALLS = 2
"""Calls that an engine has at a time: it works on the second one while this process reads the result of the first, so that its
GPU never waits. New weights wait for their ends."""
THREADS = "async sampler: "
"""Prefix of the threads' names."""
CLOSING_SECONDS = 1.0
"""Time at the end for calls in progress: of an engine that hangs, of a reward, of an environment."""
STOPPING_SECONDS = 0.2
"""Interval at which a wait checks whether the run is being stopped."""

EngineCall = Callable[[], list[tuple[str, Completion]]]
"""Waits for the end of a call of an engine, and returns its completions."""


class AsyncSampler:
    """The threads that carry out an :class:`AsyncSchedule`, from the first :meth:`paused` until :meth:`close`."""

    def __init__(
        self,
        sampling: Sampling,
        reward: Callable[[list[Rollout]], list[Rollout]],
        *,
        prompts_per_step: int,
        steps: int,
        max_staleness: int,
        partial_rollouts: bool,
        max_num_seqs: int,
    ) -> None:
        """``reward`` adds rewards to completions. With ``partial_rollouts`` new weights reach completions in progress; without,
        they wait until these are complete."""
        self.sampling = sampling
        self.reward = reward
        self.partial_rollouts = partial_rollouts
        self.schedule = AsyncSchedule(
            sampling.schedule,
            sampling.engines.size,
            sampling.environments,
            prompts_per_step=prompts_per_step,
            steps=steps,
            max_staleness=max_staleness,
            max_num_seqs=max_num_seqs,
        )
        self._changed = threading.Condition()
        """Guards the schedule and all that follows; notified after each change."""
        self._busy_engines: set[int] = set()
        self._busy_environments: set[int] = set()
        """Engines, and processes of environments, that a thread is calling."""
        self._paused = False
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        with self._changed:
            return self.schedule.state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state; call it before the first :meth:`paused`."""
        self.schedule.restore(state)

    @contextmanager
    def paused(self, version: int, empty: bool) -> Iterator[None]:
        """Leave the engines to the caller; afterwards they hold the weights of this version, and sampling continues.

        With ``empty`` no completion is in progress meanwhile.
        """
        with self._changed:
            if empty or not self.partial_rollouts:
                self.schedule.draining = True
                self._wait_for(
                    lambda: self.schedule.is_empty and not self._busy_environments, "completions under way to end"
                )
            self._paused = True
            self._wait_for(lambda: not self._busy_engines, "engines to pause")
        yield
        with self._changed:
            self._paused = False
            self.schedule.draining = False
            self.schedule.version = version
            self.schedule.missing = self.schedule.prompts_per_step
            self._changed.notify_all()
        if not self._threads:
            self._start()

    def next_batch(self, count: int) -> list[Rollout]:
        """Rewarded completions of ``count`` prompts: those that can wait no longer, then the earliest that are ready."""
        with self._changed:
            self.schedule.missing = count
            self._changed.notify_all()
            self._wait_for(lambda: self.schedule.can_take(count), f"the completions of {count} prompts")
            rollouts = self.schedule.take(count)
            self._changed.notify_all()
            return rollouts

    def release(self) -> None:
        """Does nothing: engines keep their devices."""

    def close(self) -> None:
        """End the threads. Samples in progress are dropped; their prompts are drawn again when the run resumes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:  # daemon threads: one that is still in a call ends with the process that it calls
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        self.sampling.engines.all(Engine.drop_all)  # requests of an attempt before this one
        loops: dict[str, Callable[[], None]] = {"rewards": self._reward_groups}
        loops |= {f"engine {number}": partial(self._run_engine, number) for number in range(self.sampling.engines.size)}
        if self.sampling.environments:
            processes = range(self.sampling.environments.size)
            loops |= {f"environments {number}": partial(self._run_environments, number) for number in processes}
        for name, loop in loops.items():
            thread = threading.Thread(target=self._run, args=(loop,), name=f"{THREADS}{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop; its error is raised by the caller's next wait."""
        try:
            loop()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    @contextmanager
    def _no_longer_busy(self, busy: set[int], number: int) -> Iterator[None]:
        """Clear the mark also after a call that failed, or :meth:`paused` would wait for it."""
        try:
            yield
        finally:
            with self._changed:
                busy.discard(number)
                self._changed.notify_all()

    def _run_engine(self, engine: int) -> None:
        calls: deque[EngineCall] = deque()
        with self._no_longer_busy(self._busy_engines, engine):
            while self._keep_busy(engine, calls):
                done = calls.popleft()()
                with self._changed:
                    for episode, completion in done:
                        self.schedule.add_turn(engine, episode, completion)
                    if not calls:
                        self._busy_engines.discard(engine)
                    self._changed.notify_all()

    def _keep_busy(self, engine: int, calls: deque[EngineCall]) -> bool:
        """Add calls of the engine as long as it has work, up to ``CALLS``; waits for the first one. False once closed."""

        def may_sample() -> bool:
            return not self._paused and self.schedule.has_work(engine)

        while len(calls) < CALLS:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(calls) or may_sample())
                if self._closed:
                    return False
                if not may_sample():
                    break
                requests = self.schedule.next_requests(engine)
                self._busy_engines.add(engine)
                self._changed.notify_all()  # prompts that begin may have environments to reset
            sampling = self.sampling
            options = (sampling.schedule.generation, sampling.stop_ids, SLICE_SECONDS, sampling.decoding)
            calls.append(self.sampling.engines.start(engine, Engine.advance, requests, *options))
        return True

    def _run_environments(self, process: int) -> None:
        environments = self.sampling.environments
        assert environments
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self.schedule.to_answer[process]))
                if self._closed:
                    return
                episodes = self.schedule.next_to_answer(process)
                self._busy_environments.add(process)
            with self._no_longer_busy(self._busy_environments, process):
                for episode in environments.answer(episodes, process):
                    with self._changed:
                        self.schedule.add_answer(episode)
                        self._changed.notify_all()

    def _reward_groups(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.schedule.complete)
                if self._closed:
                    return
                groups = self.schedule.next_to_reward()
            episodes = [episode for group in groups.values() for episode in group]
            rewarded = self.reward(self.sampling.rollouts(episodes))
            with self._changed:
                self.schedule.add_rewarded(rewarded)
                self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool], reason: str) -> None:
        """Wait with the lock held. Raises an error of a thread, Stopped, or DeadlineExceeded."""
        timeout = self.sampling.engines.timeout
        deadline = time.monotonic() + timeout
        while not condition():
            if self._error:
                raise self._error
            self.sampling.check()
            self._changed.wait(STOPPING_SECONDS)
            if time.monotonic() > deadline and not condition():
                raise DeadlineExceeded(f"waited {timeout:g} seconds for {reason} (resources.wait_timeout_seconds)")
