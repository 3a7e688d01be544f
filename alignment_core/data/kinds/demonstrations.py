"""Demonstrations: prompts with an answer each, or conversations, in which the assistant's messages are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format, texts
from alignment_core.data.kinds.preferences import formats_by_pair
from alignment_core.data.limits import Limits
from alignment_core.data.messages import Messages, as_messages, assistant, user
from alignment_core.data.overlap import digest_of_prompt
from alignment_core.data.tasks import Problem
from alignment_core.data.template import Renderer, Tools, TrainingText


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and what is to be said: both are strings or both are messages. The assistant's words in ``completion`` are
    the targets."""

    prompt: str | Messages
    completion: str | Messages
    tools: Tools | None = field(default=None, kw_only=True)
    """What the assistant could call."""

    def prompts(self) -> tuple[str, ...]:
        """One for each assistant turn that is trained."""
        if isinstance(self.completion, str):
            return (digest_of_prompt(self.prompt),)
        prompt = as_messages(self.prompt, "user")
        messages = prompt + self.completion
        turns = (turn for turn in range(len(prompt), len(messages)) if messages[turn]["role"] == "assistant")
        return tuple(digest_of_prompt(messages[:turn]) for turn in turns)

    def render(self, renderer: Renderer, last: bool = False) -> list[TrainingText]:
        """One sequence; or one per assistant turn, where the template shows earlier turns otherwise later on.

        Only the ``last`` turn is trained, or all of them.
        """
        if isinstance(self.prompt, str) and isinstance(self.completion, str):
            if not renderer.template and not self.tools:
                spans, empty = [(self.completion, True)], not self.completion.strip()
                return [renderer.join(self.prompt, spans, empty, renderer.bos)]
            prompt, completion = user(self.prompt), assistant(self.completion)
        else:
            prompt, completion = list(self.prompt), list(self.completion)  # type: ignore[arg-type]
        messages = prompt + completion
        turns = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] == "assistant"]
        return _conversation(messages, turns[-1:] if last else turns, renderer, self.tools)

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        last = limits.config.assistant_turns == "last"
        return [texts.fit(text, limits) for text in self.render(limits.renderer, last)]


def _conversation(
    messages: Messages, turns: Sequence[int], renderer: Renderer, tools: Tools | None
) -> list[TrainingText]:
    """Train the assistant turns with these numbers."""
    rendered = [renderer.around(messages, turn, tools) for turn in turns]
    empty = [not messages[turn]["content"].strip() and not messages[turn].get("tool_calls") for turn in turns]
    # Each rendering begins with the one before: then the last one shows every turn as inference saw it.
    if all(later.startswith(earlier) for (_, earlier), (later, _) in pairwise(rendered)):
        spans, end = [], len(rendered[0][0])
        for before, after in rendered:
            spans += [(after[end : len(before)], False), (after[len(before) :], True)]
            end = len(after)
        return [renderer.join(rendered[0][0], spans, any(empty))]
    return [
        renderer.join(before, [(after.removeprefix(before), True)], nothing)
        for (before, after), nothing in zip(rendered, empty, strict=True)
    ]


def _of_messages(row: Fields) -> Demonstration:
    messages = row.messages("messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("`messages` has no assistant message, so there is nothing to train on")
    if messages[0]["role"] == "assistant":
        raise ValueError("`messages` begins with an assistant message; there is no prompt before it")
    return Demonstration([], messages, tools=row.tools())


def _of_prompt_and_completion(row: Fields) -> Demonstration:
    prompt, completion = row.prompt(), row.text_or_messages("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Demonstration(prompt, completion, tools=row.tools())
    completion = as_messages(completion, "assistant")
    if not any(message["role"] == "assistant" for message in completion):
        raise ValueError("`completion` has no assistant message")
    return Demonstration(as_messages(prompt, "user"), completion, tools=row.tools())


class Demonstrations(texts.Texts):
    """Texts of which the answers alone are targets; plain texts may be among them."""

    gives = "demonstrations"
    formats = {
        "messages": Format(("messages",), _of_messages, ("tools",)),
        "prompt_completion": Format(("prompt", "completion"), _of_prompt_and_completion, ("tools",)),
        **texts.Texts.formats,
        **formats_by_pair(lambda pair, row: Demonstration(pair.prompt, pair.chosen, tools=pair.tools)),
    }
    native = "prompt_completion"
    stream = "sft"  # as it was called first: a seed goes on drawing the rows that it drew

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "completion": problem.attempt()}


KIND = Demonstrations()
