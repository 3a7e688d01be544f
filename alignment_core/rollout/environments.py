"""Environments: what answers the policy between its turns, in processes of their own.

What the policy said stays the tokens that it sampled; what an environment says is encoded once and never trained on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from alignment_core.data.template import Renderer
from alignment_core.evaluation.failures import Failed
from alignment_core.evaluation.function_process import FunctionProcess
from alignment_core.recipes.rl import EnvironmentConfig
from alignment_core.rollout.environment_calls import FIELD
from alignment_core.rollout.episodes import Episode

ACT = "alignment_core.rollout.environment_calls:act"


class Environments:
    """The episodes' environments, spread over processes; close it, from any thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        renderer: Renderer,
        decode: Callable[[Sequence[int]], str],
        room: int,
        processes: int,
        timeout: float,
    ) -> None:
        """``renderer`` gives the tokens of what an environment says, ``room`` is the longest completion in tokens.

        An answer has ``timeout`` seconds.
        """
        self.config, self.renderer, self.decode, self.room = config, renderer, decode, room
        self._processes = [FunctionProcess(ACT, timeout, FIELD) for _ in range(processes)]

    @property
    def size(self) -> int:
        """Processes."""
        return len(self._processes)

    def place(self, episode: Episode) -> int:
        """The process that has the episode's environment."""
        return zlib.crc32(episode.name.encode()) % self.size

    def answer(self, episodes: Sequence[Episode], place: int) -> Iterator[Episode]:
        """Let the environments of these episodes, all at one place, speak; each episode as soon as it was answered."""
        for number, answer in self._processes[place].answers([self._call(episode) for episode in episodes]):
            self._heard(episodes[number], answer)
            yield episodes[number]
        over = [["close", episode.name] for episode in episodes if episode.over]
        for _ in self._processes[place].answers(over):
            pass

    def answer_all(self, episodes: Sequence[Episode]) -> None:
        """The same for episodes of all places."""
        for place in range(self.size):
            for _ in self.answer([one for one in episodes if self.place(one) == place], place):
                pass

    def _call(self, episode: Episode) -> list[Any]:
        if episode.began is None:
            episode.began = time.monotonic()
            prompt = episode.prompt
            return ["reset", episode.name, self.config.name, self.config.options, prompt["prompt"], prompt["label"]]
        return ["step", episode.name, self.decode(episode.ids[episode.turn :])]

    def _heard(self, episode: Episode, answer: Any) -> None:
        """Put an answer into its episode."""
        if isinstance(answer, Failed):
            episode.failure, episode.over = answer, True
            return
        episode.reward += answer.get("reward", 0.0)
        if answer.get("done") or (episode.turns and episode.turns == self.config.max_turns):
            episode.over = True
        elif time.monotonic() - (episode.began or 0.0) > self.config.episode_seconds:
            late = f"was not over within {self.config.episode_seconds:g} seconds (rl.environment.episode_seconds)"
            episode.failure, episode.over = Failed("timeout", late), True
        elif episode.finish_reason == "length":
            episode.over = True
        elif answer["observation"]:
            self._tell(episode, answer["observation"])

    def _tell(self, episode: Episode, text: str) -> None:
        """Let the policy hear this before its next turn, if there is room for both."""
        if episode.turns == 0:
            prompt = self.renderer.told_first(episode.prompt["prompt"], text, self.config.role)
            if len(prompt) - len(episode.prompt["prompt_ids"]) < self.room:
                episode.prompt_ids = prompt
            else:
                many = f"says {len(text)} characters first: no room in rl.generation.max_completion_length {self.room}"
                episode.failure, episode.over = Failed("wrong_shape", many), True
            return
        ids = self.renderer.told(text, self.config.role)
        if episode.length + len(ids) < self.room:
            episode.hear(ids)
        else:
            episode.finish_reason, episode.over = "no room", True

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
