"""Schedule of an asynchronous sampler: which prompts begin when, where each episode stands, and which draws a step takes.

Plain state without threads or waiting; :class:`~alignment_core.rollout.async_sampler.AsyncSampler` uses it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.inference.completions import Completion, Request
from alignment_core.rollout.prompt_schedule import PromptSchedule
from alignment_core.rollout.rollout import Rollout


def choose(last: Mapping[int, int], ready: Container[int], step: int, count: int, per_step: int) -> list[int] | None:
    """The ``count`` draws that a step takes; None while some of them are not ready.

    First those that must be taken now, or a later step would have more than ``per_step`` draws that can wait no longer; then
    the earliest that are ready. Args: ``last`` the last step that may take each draw.
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


@dataclass
class EngineWork:
    """The episodes of one engine that are not over."""

    episodes: dict[str, Episode] = field(default_factory=dict)
    """By name."""
    to_sample: list[Episode] = field(default_factory=list)
    """Those that wait for the policy's next turn."""
    sampling: set[str] = field(default_factory=set)
    """Names of those whose turn the engine is sampling."""


class AsyncSchedule:
    """Each draw of a prompt goes through: drawn, sampled (turns of its episodes alternate with their environments), complete,
    rewarded, and taken by a step."""

    def __init__(
        self,
        schedule: PromptSchedule,
        engines: int,
        environments: Environments | None,
        *,
        prompts_per_step: int,
        steps: int,
        max_staleness: int,
        max_num_seqs: int,
    ) -> None:
        """``max_num_seqs``: completions that an engine samples at a time."""
        self.schedule = schedule
        self.environments = environments
        self.prompts_per_step = prompts_per_step
        self.steps = steps
        self.max_staleness = max_staleness
        self.max_num_seqs = max_num_seqs
        self.version = 0
        """Training steps of the weights in the engines."""
        self.drawn = 0
        """Number of prompts drawn so far."""
        self.draining = False
        """Whether no further prompt may begin."""
        self.missing = prompts_per_step
        """Prompts that the current step still takes."""
        self.began: dict[int, int] = {}
        """Draws that no step has taken, and the version with which each began."""
        self.redraw: deque[int] = deque()
        """Draws of a resumed run that are sampled again."""
        self.engines = [EngineWork() for _ in range(engines)]
        self.to_answer: list[list[Episode]] = [[] for _ in range(environments.size if environments else 0)]
        """By process of environments: episodes that wait for their environment."""
        self.groups: dict[int, list[Episode]] = {}
        """All episodes of the draws that are being sampled."""
        self.complete: list[int] = []
        """Draws that wait for their rewards."""
        self.ready: dict[int, list[Rollout]] = {}
        """Rewarded completions by draw."""

    @property
    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint: the next draw, and the draws that no step has taken."""
        return {"drawn": self.drawn, "pending": sorted(self.began) + list(self.redraw)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.drawn = state["drawn"]
        self.redraw = deque(state["pending"])

    @property
    def is_empty(self) -> bool:
        """Whether no episode is being sampled or waits for its environment."""
        return not any(engine.episodes for engine in self.engines)

    def has_work(self, engine: int) -> bool:
        """Whether the engine has something to sample, or may begin a prompt."""
        work = self.engines[engine]
        return bool(work.sampling or work.to_sample) or self._can_begin(engine)

    def next_requests(self, engine: int) -> list[Request]:
        """Requests for the engine: of its episodes whose environment has answered, and of prompts that begin now."""
        self._begin_prompts(engine)
        work = self.engines[engine]
        requests = [self.schedule.request(episode) for episode in work.to_sample]
        work.to_sample.clear()
        work.sampling |= {request.name for request in requests}
        return requests

    def add_turn(self, engine: int, name: str, completion: Completion) -> None:
        """An engine completed the policy's turn in an episode."""
        work = self.engines[engine]
        work.sampling.remove(name)
        episode = work.episodes[name]
        episode.append_turn(completion)
        if self.environments:
            self.to_answer[self.environments.process_of(episode)].append(episode)
        else:
            self._end(episode, engine)

    def add_answer(self, episode: Episode) -> None:
        """An environment answered in an episode, or ended it."""
        engine = next(number for number, work in enumerate(self.engines) if episode.name in work.episodes)
        if episode.over:
            self._end(episode, engine)
        else:
            self.engines[engine].to_sample.append(episode)

    def _end(self, episode: Episode, engine: int) -> None:
        # Looks at the engine's episodes, not at `over`: the thread of an environment sets that before it reports the episode.
        episodes = self.engines[engine].episodes
        del episodes[episode.name]
        if not any(other.name in episodes for other in self.groups[episode.draw]):
            self.complete.append(episode.draw)

    def next_to_answer(self, process: int) -> list[Episode]:
        """The episodes that wait for their environment in this process."""
        episodes = self.to_answer[process]
        self.to_answer[process] = []
        return episodes

    def next_to_reward(self) -> dict[int, list[Episode]]:
        """The complete groups that wait for their rewards, by draw."""
        groups = {draw: self.groups.pop(draw) for draw in self.complete}
        self.complete.clear()
        return groups

    def add_rewarded(self, rollouts: Sequence[Rollout]) -> None:
        """Complete groups have their rewards."""
        for rollout in rollouts:
            self.ready.setdefault(rollout.group, []).append(rollout)

    def can_take(self, count: int) -> bool:
        """Whether the draws of a step of ``count`` prompts are ready."""
        return self._chosen(count) is not None

    def take(self, count: int) -> list[Rollout]:
        """The completions of ``count`` prompts, by draw, once they are ready."""
        chosen = self._chosen(count) or []
        self.missing = 0
        for draw in chosen:
            del self.began[draw]
        return [rollout for draw in sorted(chosen) for rollout in self.ready.pop(draw)]

    def _chosen(self, count: int) -> list[int] | None:
        last = {draw: version + self.max_staleness for draw, version in self.began.items()}
        return choose(last, self.ready, self.version, count, self.prompts_per_step)

    def _prompts_to_begin(self) -> int:
        if self.draining:
            return 0
        steps_ahead = min(self.max_staleness, self.steps - 1 - self.version)
        most = steps_ahead * self.prompts_per_step + self.missing
        return max(len(self.redraw), most - len(self.began))

    def _can_begin(self, engine: int) -> bool:
        episodes = len(self.engines[engine].episodes)
        has_room = not episodes or episodes + self.schedule.generation.num_generations <= self.max_num_seqs
        return has_room and self._prompts_to_begin() > 0

    def _begin_prompts(self, engine: int) -> None:
        """Begin this engine's share of the prompts that may begin, as far as it has room."""
        work = self.engines[engine]
        for _ in range(-(-self._prompts_to_begin() // len(self.engines))):
            if not self._can_begin(engine):
                return
            draw = self._next_draw()
            self.began[draw] = self.version
            self.groups[draw] = self.schedule.episodes(draw)
            for episode in self.groups[draw]:
                work.episodes[episode.name] = episode
                if self.environments:
                    self.to_answer[self.environments.process_of(episode)].append(episode)
                else:
                    work.to_sample.append(episode)

    def _next_draw(self) -> int:
        if self.redraw:
            return self.redraw.popleft()
        self.drawn += 1
        return self.drawn - 1
