"""Prompts, which a policy is to answer, with the right answer where one is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.data.kinds import KEPT, Format, Kind, PromptExample
from alignment_core.data.kinds.preferences import formats_by_pair
from alignment_core.data.limits import Limits, column_of_images
from alignment_core.data.messages import Messages
from alignment_core.data.tasks import Problem

BESIDE = ("label", "task", "tools", "images")
"""Columns that prompts may have beside their words."""


@dataclass(frozen=True)
class Prompt(PromptExample):
    """A prompt, with its label and the built-in task that can verify it."""

    label: str | None = None
    task: str | None = None

    def fit(self, limits: Limits) -> dict[str, Any] | str:
        """At least one token is left for the answer."""
        ids, text = limits.renderer.prompt(self.prompt, self.tools)
        columns = {"prompt_ids": ids, "prompt": text, "label": self.label, "task": self.task}
        columns |= {"messages": None, "tools": None, **column_of_images(text)}
        room = limits.room(len(ids), 1)
        if isinstance(room, str):
            return room
        if room[0] == len(ids):
            if text != self.prompt:  # as it was before the chat template
                columns["messages"] = json.dumps(self.prompt, ensure_ascii=False)
                columns["tools"] = json.dumps(self.tools, ensure_ascii=False) if self.tools else None
            return columns
        return limits.cut(columns, "prompt", limits.cut_prompt(ids, room[0]))


def _with_label(prompt: str | Messages, row: Fields) -> Prompt:
    return Prompt(prompt, row.label(), row.optional_text("task"), tools=row.tools())


def _of_messages(row: Fields) -> Prompt:
    """The conversation without the answer at its end, for a model to continue."""
    messages = row.messages("messages")
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("`messages` holds only assistant messages; there is no prompt")
    return _with_label(messages[:end], row)


def _of_prompt(row: Fields) -> Prompt:
    return _with_label(row.prompt(), row)


class Prompts(Kind):
    """Rows that are sampled from, scored and compared.

    ``messages`` is the prompt as it was before the chat template, as JSON: a list of messages, or a text; ``tools`` are the
    schemas of the functions that it offers, as JSON. Both are null where no template was applied, and where the prompt was
    cut, because then they are no longer what a model sees.
    """

    gives = "prompts"
    columns = {
        "prompt_ids": "ids",
        "prompt": "text",
        "label": "text?",
        "task": "text?",
        "messages": "text?",
        "tools": "text?",
        KEPT: "text?",
        "source": "text",
    }
    formats = {
        "prompts": Format(("prompt",), _of_prompt, BESIDE),
        "messages": Format(("messages",), _of_messages, BESIDE),
        **formats_by_pair(lambda pair, row: _with_label(pair.prompt, row), ("label", "task")),
        "prompt_completion": Format(("prompt", "completion"), _of_prompt, BESIDE),
    }
    native = "prompts"
    takes_images = True
    policy_answers = True

    def sequences(self, row: Mapping[str, Any]) -> Sequence[tuple[int, None]]:
        return ((len(row["prompt_ids"]), None),)

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.prompt, "label": problem.answer, "task": problem.task}


KIND = Prompts()
