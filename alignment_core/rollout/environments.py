"""Environments: what answers the policy between its turns, in processes of their own.

What the policy said stays the tokens that it sampled; what an environment says is encoded once and never trained on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.evaluation.failures import Failed
from alignment_core.evaluation.function_process import FunctionProcess
from alignment_core.evaluation.verifiers import function_content, load_function
from alignment_core.recipes.rl import EnvironmentConfig
from alignment_core.rollout.environment_calls import FIELD
from alignment_core.rollout.episodes import Episode
from alignment_core.rollout.tool_calls import TAGS

ACT = "alignment_core.rollout.environment_calls:act"


def environment_content(config: EnvironmentConfig) -> dict[str, Any]:
    """What of an environment decides a result, for stage keys, where that is more than the recipe says.

    A class may say it of its options, by ``content(**options)``. Raises UserError if there is no such class.
    """
    found = {"name": function_content(config.name, FIELD)}
    of_options = getattr(load_function(config.name, FIELD), "content", None)
    try:
        return {**found, "options": of_options(**config.options)} if of_options else found
    except TypeError as error:
        raise UserError(f"rl.environment.options: {error}") from None


class Environments:
    """The episodes' environments, spread over processes; close it, from any thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Any,
        room: int,
        processes: int,
        timeout: float,
    ) -> None:
        """``room`` is the longest completion in tokens; an answer has ``timeout`` seconds."""
        self.config, self.room = config, room
        self._tokenizer, self._renderer = tokenizer, Renderer(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._unheard = {number for number, token in added if token.special and token.content not in TAGS}
        """Special tokens, which an environment is not shown."""
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
        return ["step", episode.name, self._said(episode)]

    def _said(self, episode: Episode) -> str:
        """The policy's last turn."""
        return self._tokenizer.decode([one for one in episode.ids[episode.turn :] if one not in self._unheard])

    def _told(self, said: str | list[str] | None) -> list[int]:
        """Tokens of what an environment said: a message, or several."""
        messages = [said] if isinstance(said, str) else said or []
        if not any(messages):
            return []
        return self._renderer.told([{"role": self.config.role, "content": one} for one in messages])

    def _heard(self, episode: Episode, answer: Any) -> None:
        """Put an answer into its episode."""
        if isinstance(answer, Failed):
            episode.failure, episode.over = answer, True
            return
        episode.reward += answer.get("reward", 0.0)
        ids = self._told(answer["observation"])
        full = len(episode.ids) + len(ids) >= self.room
        if full and not episode.ids:
            many = f"begins with {len(ids)} tokens, of {self.room} (rl.generation.max_completion_length)"
            episode.failure = Failed("wrong_shape", many)
        if full or answer.get("done") or episode.turns == self.config.max_turns:
            episode.over = True
            if full and not answer.get("done"):
                episode.finish_reason = "length"
            return
        if time.monotonic() - (episode.began or 0.0) > self.config.episode_seconds:
            late = f"was not over within {self.config.episode_seconds:g} seconds (rl.environment.episode_seconds)"
            episode.failure, episode.over = Failed("timeout", late), True
            return
        episode.hear(ids)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
