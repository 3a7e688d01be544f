"""Answers in steps, with a label for each step: whether it is right, or how likely that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data.fields import Fields, kind_of, short
from alignment_core.data.kinds import DroppedRow, Format, Kind, PromptExample
from alignment_core.data.limits import SHORTENED, Limits
from alignment_core.data.steps import StepLayout
from alignment_core.data.tasks import Problem

VERDICT = 1
"""Tokens behind the last step in training: a row as long as the context would be longer than learned positions."""
_WORDS = {"+": 1.0, "-": 0.0, "true": 1.0, "false": 0.0}
_MARK = "ки"
"""Marker behind each step in the data set Math-Shepherd."""


@dataclass(frozen=True)
class Stepwise(PromptExample):
    """A prompt, the steps of an answer, and how likely each is right, in [0, 1]."""

    completions: list[str]
    labels: list[float]

    def fit(self, limits: Limits) -> dict[str, Any] | str:
        """Steps beyond ``max_length`` are cut off whole. The verdict on the last step, which a model reads, too, counts."""
        layout = StepLayout(**limits.settings)
        prompt = layout.prompt(limits.renderer, self.prompt, self.tools)
        prompt_ids, ids, places = layout.lay_out(limits.renderer, prompt, self.completions)
        room = limits.room(len(prompt_ids), len(ids) + VERDICT)
        if isinstance(room, str):
            return room
        kept = sum(place + VERDICT < room[1] for place in places)
        if not kept:
            return "too_long"
        columns: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "completion_ids": ids[: places[kept - 1] + 1],
            "step_ends": places[:kept],
            "labels": self.labels[:kept],
            "prompt": prompt,
            "completion": "".join(layout.trimmed(step) + layout.separator for step in self.completions[:kept]),
        }
        if kept < len(places):
            columns[SHORTENED] = True
        return limits.cut(columns, "prompt", limits.cut_prompt(prompt_ids, room[0]))


def _of_steps(row: Fields) -> Stepwise:
    prompt, steps, labels = row.prompt(), row.value("completions"), row.value("labels")
    for role, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise ValueError(f"`{row.name(role)}` is {kind_of(value)}; a list with an entry for each step is needed")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise ValueError(f"`{row.name('completions')}[{number}]` is {kind_of(step)}; the text of a step is needed")
    if len(steps) != len(labels):
        raise ValueError(
            f"`{row.name('completions')}` has {len(steps)} steps and `{row.name('labels')}` {len(labels)} labels"
        )
    labels = [_label(label, f"{row.name('labels')}[{number}]") for number, label in enumerate(labels)]
    return Stepwise(prompt, steps, labels, tools=row.tools())


def _label(value: Any, name: str) -> float:
    """A label as a probability: true and false, + and -, or any number in [0, 1]."""
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if isinstance(value, (bool, int, float)) and 0 <= value <= 1:
        return float(value)
    raise ValueError(f"`{name}` is {kind_of(value)}; true, false, '+', '-' or a number from 0 to 1 is needed")


def _of_math_shepherd(row: Fields) -> Stepwise:
    """The text with a mark behind each step, and the same text with + or - in place of each mark."""
    text, labelled = row.text("input"), row.text("label")
    *parts, _ = text.split(_MARK)
    labels, rest = [], labelled
    for part in parts:
        if not rest.startswith(part) or (sign := rest[len(part) : len(part) + 1]) not in ("+", "-"):
            raise ValueError(
                f"`{row.name('label')}` is not `{row.name('input')}` with + or - in place of each {_MARK!r}: {short(rest)}"
            )
        labels.append(_WORDS[sign])
        rest = rest[len(part) + 1 :]
    prompt, beginning, first = (parts[0] if parts else "").partition("Step 1:")
    if not beginning or not prompt.strip():
        raise DroppedRow(
            "no_first_step", f"`{row.name('input')}` needs a question, and 'Step 1:' where its answer begins"
        )
    steps = [(beginning + first).strip(), *(part.strip() for part in parts[1:])]
    return Stepwise(prompt.strip(), steps, labels, tools=row.tools())


def _is_math_shepherd(row: Fields) -> bool:
    text = row.value("input")
    return isinstance(text, str) and _MARK in text


class StepwiseRows(Kind):
    """Rows for process reward models. ``step_ends`` are the places among ``completion_ids`` at which steps are judged."""

    gives = "answers with labels of their steps"
    columns = {
        "prompt_ids": "ids",
        "completion_ids": "ids",
        "step_ends": "ids",
        "labels": "numbers",
        "prompt": "text",
        "completion": "text",
        "source": "text",
    }
    formats = {
        "stepwise": Format(("prompt", "completions", "labels"), _of_steps, ("tools",)),
        "math_shepherd": Format(("input", "label"), _of_math_shepherd, ("tools",), fits=_is_math_shepherd),
    }
    native = "stepwise"
    reasons = {"no_first_step": f"have no question and 'Step 1:' before the first {_MARK!r}"}

    def sequences(self, row: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        return ((len(row["prompt_ids"]), len(row["completion_ids"]) + VERDICT),)

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        steps = problem.steps()
        return {
            "prompt": problem.prompt,
            "completions": [step for step, _ in steps],
            "labels": [right for _, right in steps],
        }


KIND = StepwiseRows()
