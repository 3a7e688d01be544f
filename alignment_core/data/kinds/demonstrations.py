"""Demonstrations: prompts with an answer each, or conversations, in which the assistant's messages are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format
from alignment_core.data.kinds.preferences import formats_by_pair
from alignment_core.data.kinds.texts import Texts
from alignment_core.data.limits import Limits
from alignment_core.data.message_fields import is_silent
from alignment_core.data.messages import Messages, as_messages, assistant, user
from alignment_core.data.overlap import digest_of_prompt
from alignment_core.data.tasks import Problem
from alignment_core.data.template import Renderer, Tools, TrainingText, check_unanswered


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and what is to be said: both are strings or both are messages. The assistant's words in ``completion`` are
    the targets."""

    prompt: str | Messages
    completion: str | Messages
    tools: Tools | None = field(default=None, kw_only=True)
    """Tools that the assistant could call."""
    untrained: list[int] = field(default_factory=list, kw_only=True)
    """Places in ``completion`` of turns that are no targets: those whose weight is 0."""

    def prompts(self) -> tuple[str, ...]:
        """One for each assistant turn that is trained."""
        if isinstance(self.completion, str):
            return (digest_of_prompt(self.prompt),)
        prompt = as_messages(self.prompt, "user")
        messages = prompt + self.completion
        return tuple(digest_of_prompt(messages[:turn]) for turn in self._turns(messages, len(prompt)))

    def render(self, renderer: Renderer, last: bool = False) -> list[TrainingText]:
        """One sequence; or one per assistant turn, where the template shows earlier turns otherwise later on.

        Only the ``last`` of the turns with a weight is trained, or all of them.
        """
        if isinstance(self.prompt, str) and isinstance(self.completion, str):
            if not renderer.template and not self.tools:
                spans, empty = [(self.completion, True)], not self.completion.strip()
                return [renderer.join(self.prompt, spans, empty, renderer.bos)]
            prompt, completion = user(self.prompt), assistant(self.completion)
        else:
            prompt, completion = list(self.prompt), list(self.completion)  # type: ignore[arg-type]
        messages = renderer.fields.fitted(prompt + completion, self.tools)
        turns = self._turns(messages, len(prompt))
        return _conversation(messages, turns[-1:] if last else turns, renderer, self.tools)

    def _turns(self, messages: Messages, start: int) -> list[int]:
        """The assistant's turns that are trained, from place ``start`` on, where the completion begins."""
        places = range(start, len(messages))
        return [
            place for place in places if messages[place]["role"] == "assistant" and place - start not in self.untrained
        ]

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        last = limits.config.assistant_turns == "last"
        rows = [limits.fit(text) for text in self.render(limits.renderer, last)]
        if limits.config.completion_only_loss or not self.prompt:
            return rows
        if self.untrained:
            raise ValueError(
                "a turn with the weight 0 is never trained on, but `completion_only_loss: false` trains on everything"
            )
        return [_with_prompt(rows[0]), *rows[1:]]  # of several sequences each later one begins with the one before


def _with_prompt(row: dict[str, Any] | str) -> dict[str, Any] | str:
    """A row whose prompt is trained on, too, but for its first token, which nothing predicts."""
    if isinstance(row, str):
        return row
    mask = row["loss_mask"]
    prompt = mask.index(1)
    return {**row, "loss_mask": [0] * min(prompt, 1) + [1] * (prompt - 1) + mask[prompt:]}


def _conversation(
    messages: Messages, turns: Sequence[int], renderer: Renderer, tools: Tools | None
) -> list[TrainingText]:
    """Train the assistant turns with these numbers."""
    rendered = [renderer.around(messages, turn, tools) for turn in turns]
    for turn, (before, after) in zip(turns, rendered, strict=True):
        renderer.fields.check_whole(messages, turn, after.removeprefix(before), tools)
    empty = [is_silent(messages[turn]) for turn in turns]
    ended = [before + "".join(renderer.split_end(after.removeprefix(before))) for before, after in rendered]
    # Each prompt begins with the turn before up to its end: then the last rendering shows every turn as inference saw it.
    if all(later.startswith(earlier) for earlier, (later, _) in zip(ended, rendered[1:], strict=False)):
        spans, end = [], len(rendered[0][0])
        for (before, after), to_end in zip(rendered, ended, strict=True):
            spans += [(before[end:], False), (after.removeprefix(before), True)]
            end = len(to_end)
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
    return Demonstration([], messages, tools=row.tools(), untrained=_untrained(row, "messages", messages))


def _is_conversation(row: Fields) -> bool:
    """False for ShareGPT's column beside a completion or a pair: there it is the prompt, or not read."""
    others = (("prompt", "completion"), ("chosen", "rejected"))
    return row.is_explicit("messages") or not any(all(map(row.holds, roles)) for roles in others)


def _of_prompt_and_completion(row: Fields) -> Demonstration:
    prompt, completion = row.prompt(), row.text_or_messages("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Demonstration(prompt, completion, tools=row.tools())
    completion = as_messages(completion, "assistant")
    if not any(message["role"] == "assistant" for message in completion):
        raise ValueError("`completion` has no assistant message")
    if completion[0]["role"] == "assistant":
        check_unanswered(prompt)
    untrained = _untrained(row, "completion", completion)
    return Demonstration(as_messages(prompt, "user"), completion, tools=row.tools(), untrained=untrained)


def _untrained(row: Fields, role: str, messages: Messages) -> list[int]:
    """The places of turns with the weight 0. Raises ValueError if all have it."""
    places = row.untrained(role)
    if places and len(places) == sum(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"`{row.name(role)}` has no assistant message with a weight above 0, so there is nothing to train on"
        )
    return places


class Demonstrations(Texts):
    """Texts of which the answers alone are targets; plain texts may be among them."""

    gives = "demonstrations"
    formats = {
        "messages": Format(("messages",), _of_messages, ("tools", "images"), fits=_is_conversation),
        "prompt_completion": Format(("prompt", "completion"), _of_prompt_and_completion, ("tools", "images")),
        **Texts.formats,
        **formats_by_pair(lambda pair, row: Demonstration(pair.prompt, pair.chosen, tools=pair.tools)),
    }
    native = "prompt_completion"
    takes_images = True
    trains_prompts = True
    stream = "sft"  # as it was called first: a seed goes on drawing the rows that it drew

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "completion": problem.attempt()}


KIND = Demonstrations()
