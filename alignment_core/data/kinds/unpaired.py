"""Labelled completions: a prompt, one answer to it, and whether that is a desirable one. Preferences are split into two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.data.kinds import Format, Kind, PromptExample
from alignment_core.data.kinds.preferences import Preference, answer_of, formats_by_pair
from alignment_core.data.limits import Limits, column_of_images
from alignment_core.data.messages import Messages, as_messages
from alignment_core.data.tasks import Problem

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""By lower-case text: CSV files have no booleans, and columns of numbers with gaps are fractions."""


@dataclass(frozen=True)
class Labelled(PromptExample):
    """A prompt and one answer to it: both are strings, or both are messages (then the answer is one assistant message)."""

    completion: str | Messages
    label: bool
    """Whether the answer is desirable."""

    def fit(self, limits: Limits) -> dict[str, Any] | str:
        """The answer's text lacks the end of its turn."""
        answer = limits.renderer.answered(self.prompt, self.completion, self.tools)
        if not answer.text.strip():
            return "empty_completion"
        room = limits.room(len(answer.prompt_ids), len(answer.ids))
        if isinstance(room, str):
            return room
        columns = {
            "prompt_ids": answer.prompt_ids,
            "completion_ids": answer.ids,
            "label": self.label,
            "prompt": answer.prompt,
            "completion": answer.text,
            **column_of_images(answer.prompt),
        }
        limits.cut(columns, "prompt", limits.cut_prompt(answer.prompt_ids, room[0]))
        return limits.cut(columns, "completion", answer.ids[: room[1]])


@dataclass(frozen=True)
class Split(Preference):
    """A preference pair as two rows: the chosen answer is desirable, the rejected one is not."""

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        if self.chosen == self.rejected:
            return ["identical_pair"]
        answers = ((self.chosen, True), (self.rejected, False))
        return [Labelled(self.prompt, answer, label, tools=self.tools).fit(limits) for answer, label in answers]


def _of_columns(row: Fields) -> Labelled:
    prompt, completion = row.prompt(), answer_of(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Labelled(prompt, completion, _label(row), tools=row.tools())
    prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
    if len(completion) != 1 or completion[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in completion) or "nothing"
        raise ValueError(f"`{row.name('completion')}` must be one assistant message after the prompt, not {roles}")
    return Labelled(prompt, completion, _label(row), tools=row.tools())


def _label(row: Fields) -> bool:
    """True or false; 1 and 0 stand for these."""
    known = _LABELS.get(str(row.value("label")).lower())
    return row.truth("label") if known is None else known  # which says what it is instead


class Unpaired(Kind):
    """Rows for Kahneman–Tversky optimisation."""

    gives = "labelled completions"
    columns = {
        "prompt_ids": "ids",
        "completion_ids": "ids",
        "label": "truth",
        "prompt": "text",
        "completion": "text",
        "source": "text",
    }
    formats = {
        "unpaired": Format(("prompt", "completion", "label"), _of_columns, ("tools", "images")),
        **formats_by_pair(lambda pair, row: Split(**vars(pair))),
    }
    native = "unpaired"
    takes_images = True
    reasons = {"identical_pair": "have the same chosen and rejected answer"}

    def sequences(self, row: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        return ((len(row["prompt_ids"]), len(row["completion_ids"])),)

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        answer = problem.attempt()
        return {"prompt": problem.prompt, "completion": answer, "label": answer == problem.answer}


KIND = Unpaired()
