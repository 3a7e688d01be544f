"""Preferences: a prompt and two answers to it, of which one is better."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data.fields import Fields, short
from alignment_core.data.kinds import DroppedRow, Example, Format, Kind, PromptExample
from alignment_core.data.limits import Limits, column_of_images
from alignment_core.data.messages import Messages, as_messages
from alignment_core.data.tasks import Problem
from alignment_core.data.template import Renderer

_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Preference(PromptExample):
    """One prompt and two answers to it: all strings, or all messages (then each answer is one assistant message)."""

    chosen: str | Messages
    rejected: str | Messages
    margin: float | None = None

    def render(self, renderer: Renderer) -> dict[str, Any]:
        """The columns of the whole row. Both answers' ids end with the end of the turn; their texts leave it out."""
        chosen = renderer.answered(self.prompt, self.chosen, self.tools)
        rejected = renderer.answered(self.prompt, self.rejected, self.tools)
        cut = min(len(chosen.prompt_ids), len(rejected.prompt_ids))  # an answer may change the prompt's last token
        return {
            "prompt_ids": rejected.prompt_ids[:cut],
            "chosen_ids": chosen.prompt_ids[cut:] + chosen.ids,
            "rejected_ids": rejected.prompt_ids[cut:] + rejected.ids,
            "prompt": rejected.prompt,
            "chosen": chosen.text,
            "rejected": rejected.text,
            "margin": self.margin,
            **column_of_images(rejected.prompt),
        }

    def fit(self, limits: Limits) -> dict[str, Any] | str:
        columns = self.render(limits.renderer)
        prompt, chosen, rejected = (columns[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
        if not columns["chosen"].strip() or not columns["rejected"].strip():
            return "empty_completion"
        if chosen == rejected:
            return "identical_pair"
        room = limits.room(len(prompt), max(len(chosen), len(rejected)))
        if isinstance(room, str):
            return room
        limits.cut(columns, "prompt", limits.cut_prompt(prompt, room[0]))
        limits.cut(columns, "chosen", chosen[: room[1]])
        limits.cut(columns, "rejected", rejected[: room[1]])
        return "identical_after_truncation" if columns["chosen_ids"] == columns["rejected_ids"] else columns


def _of_columns(row: Fields) -> Preference:
    chosen, rejected = answer_of(row, "chosen"), answer_of(row, "rejected")
    prompt = row.prompt() if row.has("prompt") else row.conversations()
    if isinstance(row.value("prompt"), str) and _is_conversation(chosen) and _is_conversation(rejected):
        prompt = None  # as in TRL: its text is one of the messages
    if prompt is None:
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError("there is no `prompt`: without one, `chosen` and `rejected` must be whole conversations")
        prompt, chosen, rejected = _split_conversations(chosen, rejected)
    if any(not isinstance(part, str) for part in (prompt, chosen, rejected)):
        prompt = as_messages(prompt, "user")
        chosen = _after(prompt, as_messages(chosen, "assistant"))
        rejected = _after(prompt, as_messages(rejected, "assistant"))
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if len(answer) != 1 or answer[0]["role"] != "assistant":
                roles = ", ".join(message["role"] for message in answer) or "nothing"
                raise ValueError(f"`{name}` must be one assistant message after the prompt, not {roles}")
    return Preference(prompt, chosen, rejected, row.number("margin"), tools=row.tools())


def answer_of(row: Fields, role: str) -> str | Messages:
    """An answer that is compared or labelled. Raises ValueError if its own weight says that it is no target."""
    answer = row.text_or_messages(role)
    if len(answer) - 1 in row.untrained(role):
        raise ValueError(
            f"the last message of `{row.name(role)}` has the weight 0, but this answer is what would be trained"
        )
    return answer


def _is_conversation(answer: str | Messages) -> bool:
    """Whether an answer has its prompt before it."""
    return isinstance(answer, list) and len(answer) > 1 and answer[0]["role"] != "assistant"


def _after(prompt: Messages, answer: Messages) -> Messages:
    """Many data sets give the prompt a column of its own and repeat it in front of both answers."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _is_hh(row: Fields) -> bool:
    texts = [row.value(role) for role in ("chosen", "rejected")]
    return all(isinstance(text, str) and text.startswith("\n\nHuman:") for text in texts)


def _of_hh(row: Fields) -> Preference:
    conversations = [_hh_messages(row.text(name), name) for name in ("chosen", "rejected")]
    return Preference(*_split_conversations(*conversations), row.number("margin"), tools=row.tools())


def _hh_messages(text: str, name: str) -> Messages:
    """Turns of a dialogue such as "\\n\\nHuman: hi\\n\\nAssistant: hello". Neighbours of one speaker become one turn,
    as a turn whose own text holds the marker would otherwise break the alternation that chat templates ask for."""
    head, *parts = _HH_TURN.split(text)
    if head.strip() or not parts or parts[0] != "Human":
        raise ValueError(f"`{name}` does not begin with '\\n\\nHuman:': {short(text)}")
    messages: Messages = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role, content = _SPEAKERS[speaker], content.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = "\n\n".join(filter(None, (messages[-1]["content"], content)))
        else:
            messages.append({"role": role, "content": content})
    return messages


def _split_conversations(chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """The shared prompt and the two answers of two whole conversations that differ in their last message alone."""
    for name, conversation in (("chosen", chosen), ("rejected", rejected)):
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must hold a prompt and end with an assistant message")
    if chosen[:-1] != rejected[:-1]:
        raise DroppedRow(
            "different_prompts",
            "`chosen` and `rejected` differ before their last message; they must share the whole prompt",
        )
    return chosen[:-1], chosen[-1:], rejected[-1:]


def formats_by_pair(take: Callable[[Preference, Fields], Example], also: tuple[str, ...] = ()) -> dict[str, Format]:
    """The formats of preferences, for kinds of rows that take a part of each, and columns that they ``also`` read."""
    return {
        "preference": Format(
            ("chosen", "rejected"),
            lambda row: take(_of_columns(row), row),
            ("prompt", "messages", "margin", "tools", "images", *also),
            fits=lambda row: not _is_hh(row),
        ),
        "hh": Format(("chosen", "rejected"), lambda row: take(_of_hh(row), row), ("margin", "tools", *also)),
    }


class Preferences(Kind):
    """Rows for reward models and direct preference optimisation."""

    gives = "preference pairs"
    columns = {
        "prompt_ids": "ids",
        "chosen_ids": "ids",
        "rejected_ids": "ids",
        "margin": "number?",
        "prompt": "text",
        "chosen": "text",
        "rejected": "text",
        "source": "text",
    }
    formats = formats_by_pair(lambda pair, row: pair)
    native = "preference"
    takes_images = True
    reasons = {
        "identical_pair": "have the same chosen and rejected answer",
        "identical_after_truncation": "have answers that do not differ within max_length",
    }
    stream = "preference"  # as it was called first: a seed goes on drawing the rows that it drew

    def sequences(self, row: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        """The prompt with each answer."""
        prompt = len(row["prompt_ids"])
        return ((prompt, len(row["chosen_ids"])), (prompt, len(row["rejected_ids"])))

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "chosen": problem.answer, "rejected": problem.mistake()}


KIND = Preferences()
