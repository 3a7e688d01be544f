"""Environments, which respond to the policy between its turns, in processes of their own.

The policy's turns keep the tokens that it sampled; observations are encoded once and never trained on.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from alignment_core.data.completion_text import CompletionText
from alignment_core.data.messages import Messages, as_given, tools_of
from alignment_core.data.template import Renderer, Tools
from alignment_core.data.turn_end import chat_template_of
from alignment_core.environments.calls import AGENT, FIELD, options_content
from alignment_core.environments.episode import NO_ROOM, Episode
from alignment_core.environments.observations import Content
from alignment_core.environments.observed_images import ObservedImages
from alignment_core.environments.tool_calls import TAGS, TOOLS, answers, check_format, parse, unclosed_thought
from alignment_core.errors import Stopped, UserError
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.results import failure_of
from alignment_core.rewards.verify import Verifier
from alignment_core.source_code import PACKAGE
from alignment_core.user_code.dependencies import COUNTED
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.functions import function_content
from alignment_core.user_code.process import FunctionProcess

VERIFIER = "rl.environment.options.verifier"
ACT = "alignment_core.environments.calls:act"
NO_IMAGES = (
    "rl.environment.images: the policy reads text alone, or its folder has no processor_config.json or "
    "preprocessor_config.json: choose an image-text model, add its processor's files, or leave the field out"
)
CONTENT_SECONDS = 60.0
CUE = 16
"""Number of tokens before a turn in which the opening mark of a thought is searched."""


def environment_content(config: EnvironmentConfig) -> dict[str, Any]:
    """What an environment adds to stage keys beside the recipe's fields: its code, and the result of ``content(**options)`` if
    the class or agent has such a function.

    Raises UserError if there is no environment of this name, or if ``content`` fails.
    """
    kind, name, field = ("name", config.name, FIELD) if config.name else ("agent", str(config.agent), AGENT)
    content = {kind: function_content(name, field)}
    of_options = _options_content(name, field, config.options, str(content))
    return content if of_options is None else {**content, "options": of_options}


def chat_template_of_turns(config: EnvironmentConfig | None, prompts: Path) -> str | None:
    """The chat template of the policy's conversations, None for the tokenizer's own: that of the prompts, except with an agent,
    whose requests replace them."""
    return None if config is not None and config.agent is not None else chat_template_of(prompts)


_WITHOUT_CONTENT: set[tuple[str, str]] = set()
"""User environments without a ``content``, by name and source, so that computing a key again starts no process."""


def _options_content(name: str, field: str, options: dict[str, Any], source: str) -> Any:
    """The result of an environment's ``content``: ours is called here, a user's in a process of its own."""
    if name.startswith(f"{PACKAGE}."):
        answer = options_content(name, field, options)
    elif (name, source) in _WITHOUT_CONTENT:
        return None
    else:
        with FunctionProcess(ACT, CONTENT_SECONDS, field) as process:
            answer = next(answer for _, answer in process.answers([["content", name, field, options]]))
    if isinstance(answer, Failed):
        raise UserError(f"rl.environment.options: {name}.content {answer}")
    if "problem" in answer:
        raise UserError(answer["problem"])
    if "content" not in answer:
        _WITHOUT_CONTENT.add((name, source))
    return answer.get("content")


class Environments:
    """The environments of episodes, distributed over processes; may be closed from any thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Any,
        processes: int,
        timeout: float,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        load_timeout: float | None = None,
        image_tokens: Collection[int] = (),
        images: ObservedImages | None = None,
    ) -> None:
        """``chat_template`` is that of the conversations, if it is not the tokenizer's own; ``eos_token_ids`` are those of the
        policy's generation_config.json; ``timeout`` is the deadline of a call in seconds, ``load_timeout`` that of loading the
        class (default: the same); ``image_tokens`` are the tokens at the places of images, which no text of an environment may
        have; ``images`` keeps images for a policy that reads some. Raises UserError for an agent without any chat template, and
        for images in observations of a policy of text."""
        self.config = config
        if config.images and images is None:
            raise UserError(NO_IMAGES)
        self._images = images
        self._renderer = Renderer(tokenizer, chat_template, eos_token_ids, images.tokens if images else None)
        if config.agent is not None and not self._renderer.template:
            raise UserError(
                f"{AGENT}: its messages need a chat template, and the policy has none: set `model.chat_template`"
            )
        self._reads_calls = config.agent is not None or config.name == TOOLS
        self._calls_checked = False
        added = tokenizer.added_tokens_decoder.items()
        self._hidden = {number for number, token in added if token.special and token.content not in TAGS}
        """Special tokens, which are removed from the text for an environment unless its configuration keeps them."""
        self._image_tokens = frozenset(image_tokens)
        self._decode = CompletionText(tokenizer, self._renderer.turn_end, skip_special_tokens=False)
        self._processes = [FunctionProcess(ACT, timeout, FIELD, load_timeout=load_timeout) for _ in range(processes)]
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._files = COUNTED.get({})  # now: threads, which open verifiers, have no context
        self._verifiers: dict[tuple[int, str], Verifier] = {}
        """By process and name, because each process has its own thread."""
        self._opening = threading.Lock()
        self._closed = False

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def process_of(self, episode: Episode) -> int:
        """The process of the episode's environment."""
        # Not hash(), which differs from run to run: which episodes share a process, and the state that it keeps, must not.
        return zlib.crc32(episode.name.encode()) % self.size

    def answer(self, episodes: Sequence[Episode], process: int) -> Iterator[Episode]:
        """Call the environments of these episodes, which all are in one process; yields each episode once it has its answer.

        An episode whose environment was lost with its process begins again, once.
        """
        waiting = episodes
        finals: list[tuple[Episode, dict[str, str]]] = []
        while waiting:
            lost = []
            for number, answer in self._processes[process].answers([self._call(episode) for episode in waiting]):
                episode = waiting[number]
                lost_it = isinstance(answer, Failed) and answer.reason == "crashed"
                # Once only: an episode whose process dies again may be what kills it.
                if lost_it and episode.turns and not episode.restarts:
                    episode.restart()
                    lost.append(episode)
                else:
                    self._answered(episode, answer)
                    if episode.failure is None and answer.get("verify"):
                        finals.append((episode, answer["verify"]))
                    else:
                        yield episode
            waiting = lost
        yield from self._verified(finals, process)
        over = [["close", episode.name] for episode in episodes if episode.over]
        for _ in self._processes[process].answers(over):
            pass

    def answer_all(self, episodes: Sequence[Episode]) -> None:
        """The same for episodes of all processes, which work at the same time."""

        def answer(process: int) -> None:
            for _ in self.answer([episode for episode in episodes if self.process_of(episode) == process], process):
                pass

        with ThreadPoolExecutor(self.size) as threads:
            for _ in threads.map(answer, range(self.size)):
                pass

    def _call(self, episode: Episode) -> list[Any]:
        config, prompt = self.config, episode.prompt
        if not episode.began:
            episode.began = True
            images = [str(path) for path in episode.images]
            who = [episode.name, config.name, config.agent, config.options]
            return ["reset", *who, prompt["prompt"], prompt["label"], images]
        turn = episode.ids[episode.turn_start :].tolist()
        before = len(episode.prompt_ids) + episode.turn_start
        counts = {"prompt_tokens": before, "completion_tokens": len(turn), "total_tokens": before + len(turn)}
        text = self._text(episode)
        return ["step", episode.name, {"text": text, "finish_reason": episode.finish_reason, "usage": counts}]

    def _answered(self, episode: Episode, answer: Any) -> None:
        """Apply an answer to its episode."""
        try:
            if isinstance(answer, Failed):
                raise answer
            self._apply(episode, answer)
        except Failed as failure:
            episode.failure, episode.over = failure, True

    def _verified(self, finals: Sequence[tuple[Episode, dict[str, str]]], process: int) -> Iterator[Episode]:
        """Add the score of each episode's answer to its reward."""
        for name in dict.fromkeys(final["verifier"] for _, final in finals):
            answers = [(episode, final["completion"]) for episode, final in finals if final["verifier"] == name]
            rows = [_as_row(episode, completion) for episode, completion in answers]
            for number, score in self._verifier(process, name)(rows):
                episode, _ = answers[number]
                episode.failure = failure_of(score)
                episode.reward += 0.0 if episode.failure else score
                yield episode

    def _verifier(self, process: int, name: str) -> Verifier:
        with self._opening:
            if self._closed:
                raise Stopped("the environments were closed")
            if (process, name) not in self._verifiers:
                self._verifiers[process, name] = Verifier(
                    name, self._timeout, VERIFIER, files=self._files, load_timeout=self._load_timeout
                )
            return self._verifiers[process, name]

    def _apply(self, episode: Episode, answer: dict[str, Any]) -> None:
        """Raises Failed for an episode that cannot be trained on."""
        episode.reward += answer.get("reward", 0.0)
        episode.seconds += answer["seconds"]
        if answer.get("done") or (episode.turns and episode.turns == self.config.max_turns):
            episode.over = True
        elif episode.seconds > self.config.episode_seconds:
            late = f"took more than {self.config.episode_seconds:g} seconds in all (rl.environment.episode_seconds)"
            raise Failed("timeout", late)
        elif len(episode.ids) >= episode.room:
            episode.over = True
            if episode.finish_reason == "stop":
                episode.finish_reason = NO_ROOM
        else:
            try:
                self._append_observation(episode, answer["observation"])
            except ValueError as error:
                raise Failed("wrong_shape", f"returned an observation that cannot be rendered: {error}") from None

    def _append_observation(self, episode: Episode, observation: Any) -> None:
        """Append an observation, texts or an agent's request, if there is room for it and another turn."""
        is_request = isinstance(observation, dict)
        tools = observation["tools"] if is_request else tools_of(episode.prompt)
        if is_request:
            episode.most = observation["max_tokens"]
        if episode.turns == 0:
            episode.opening, episode.images = self._first(episode, observation, tools)
            self._check_calls(tools)
            if episode.room <= 0:
                raise Failed("wrong_shape", "leaves no room for a turn (rl.generation.max_completion_length)")
            return
        given = observation["messages"] if is_request else self._messages(observation, episode)
        messages, images = self._read(given)
        last = int(episode.ids[-1])
        ended_by = last if episode.finish_reason == "stop" and last in self._renderer.turn_end.stop_ids else None
        ids = self._renderer.encode_reply(messages, ended_by, tools)
        self._check_image_tokens(ids, images)
        if len(episode.ids) + len(ids) < episode.room:
            episode.append_observation(ids, images)
        else:
            episode.finish_reason, episode.over = NO_ROOM, True

    def _first(self, episode: Episode, observation: Any, tools: Tools | None) -> tuple[list[int], tuple[Path, ...]]:
        """The prompt with the observation of `reset`, and their images; an agent's request replaces the prompt. No ids without
        an observation. Raises UserError if that would lose the prompt's images."""
        if not observation:
            return [], episode.images
        if isinstance(observation, dict):
            messages, images = self._read(observation["messages"])
            if episode.images and not images:
                raise UserError(
                    f"{AGENT}: prompts have images, and the first request of {self.config.agent} has none: let the function "
                    "have a parameter `images`, the paths of their files, and send them as parts of the type `image_url`"
                )
            ids = self._renderer.encode_conversation(messages, tools)
        else:
            messages, observed = self._read(self._messages(observation, episode))
            images = (*episode.images, *observed)
            ids = self._renderer.encode_opening(self._prompt_text(episode, tools), messages, tools)
        self._check_image_tokens(ids, images)
        return ids, images

    def _prompt_text(self, episode: Episode, tools: Tools | None) -> str:
        """The rendered prompt, with stand-ins for its images. Raises UserError for a truncated one with images."""
        prompt = episode.prompt
        if not episode.images:
            return str(prompt["prompt"])
        assert self._images is not None, "only image-text models have prompts with images"
        given = as_given(prompt)
        if given is None:
            raise UserError(
                f"rl.environment: {prompt['source']} has images and was truncated, so `reset` cannot add an observation to it: "
                "set prompts.overlong: drop"
            )
        self._images.add(episode.images)
        return self._renderer.prompt(given, tools)[1]

    def _read(self, messages: Messages) -> tuple[Messages, tuple[Path, ...]]:
        """Messages with their images by digests, and the files of these. Raises ValueError for an image that cannot be used,
        and UserError for one that the recipe does not allow."""
        if all(isinstance(message["content"], str) for message in messages):
            return messages, ()
        if self._images is None or not self.config.images:
            raise UserError(
                f"rl.environment.images: {self.config.name or self.config.agent} sends images, which the recipe does not "
                "allow: set it to true, with an image-text model"
            )
        if not self._renderer.template:
            raise UserError(
                "rl.environment.images: messages with images need a chat template, and the policy has none: set "
                "`model.chat_template`"
            )
        return self._images.read(messages)

    def _check_image_tokens(self, ids: Sequence[int], images: Sequence[Path]) -> None:
        """Raise Failed for a text with a token at whose place the policy would need an image that it does not get."""
        places = [token for token in ids if token in self._image_tokens]
        if places != (self._images.places(self._renderer, images) if images and self._images else []):
            raise Failed("wrong_shape", "returned a text with a token that stands for an image, a video or a sound")

    def _check_calls(self, tools: Tools | None) -> None:
        """Raise UserError, before the policy's first turn, if its calls could not be read."""
        if tools and self._reads_calls and not self._calls_checked:
            check_format(self._renderer, tools)
            self._calls_checked = True

    def _text(self, episode: Episode) -> str:
        """The policy's last turn as text for its environment. It begins with the mark of a thought that the prompt opened and
        the turn does not close."""
        start = episode.turn_start
        turn = episode.ids[start:].tolist()
        if self.config.skip_special_tokens:
            last = [] if episode.finish_reason == "length" else turn[-1:]  # ends the turn
            turn = [*(token for token in turn[: len(turn) - len(last)] if token not in self._hidden), *last]
        text = self._decode(turn, episode.finish_reason)
        before = self._renderer.decode([*episode.prompt_ids, *episode.ids[:start].tolist()][-CUE:])
        return f"{unclosed_thought(before, text)}{text}"

    def _messages(self, contents: str | list[Content], episode: Episode) -> Messages:
        """Messages that answer the policy's last turn; those of tools name the calls that they answer."""
        contents = [contents] if isinstance(contents, str) else contents
        if self.config.role == "tool":
            _, calls = parse(self._text(episode))
            return answers(contents, calls, episode.turns)
        return [{"role": self.config.role, "content": content} for content in contents]

    def close(self) -> None:
        """End all processes."""
        with self._opening:
            self._closed = True
        for process in self._processes:
            process.close()
        for verifier in self._verifiers.values():
            verifier.close()


def _as_row(episode: Episode, completion: str) -> dict[str, Any]:
    """An episode's answer as a row of completions for a verifier."""
    prompt = episode.prompt
    row = {name: prompt.get(name) for name in ("label", "task", "source")}
    return row | {"prompt_text": prompt["prompt"], "completion_text": completion}
