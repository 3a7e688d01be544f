"""A kind of rows as a distribution may bring it: a prompt, one answer, and whether that is a good one (KTO)."""

from dataclasses import dataclass
from typing import Any

from alignment_core.data.kinds import Format, Kind
from alignment_core.data.overlap import digest_of_prompt


@dataclass(frozen=True)
class Labelled:
    prompt: Any
    completion: object
    desirable: bool

    def prompts(self):
        return (digest_of_prompt(self.prompt),)

    def rows(self, limits):
        prompt_ids, prompt, ids, text = limits.renderer.answered(self.prompt, self.completion)
        room = limits.room(len(prompt_ids), len(ids))
        if isinstance(room, str):
            return [room]
        columns = {"prompt_ids": prompt_ids, "prompt": prompt, "completion_ids": ids, "completion": text}
        limits.cut(columns, "prompt", limits.cut_prompt(prompt_ids, room[0]))
        limits.cut(columns, "completion", ids[: room[1]])
        return [{**columns, "desirable": self.desirable}]


def _read(row):
    return Labelled(row.prompt(), row.text_or_messages("completion"), row.truth("desirable"))


class LabelledRows(Kind):
    gives = "labelled completions"
    columns = {
        "prompt_ids": "ids",
        "completion_ids": "ids",
        "desirable": "truth",
        "prompt": "text",
        "completion": "text",
        "source": "text",
    }
    formats = {"labelled": Format(("prompt", "completion", "desirable"), _read)}
    native = "labelled"

    def sequences(self, row):
        return ((len(row["prompt_ids"]), len(row["completion_ids"])),)

    def of_problem(self, problem):
        outcome = problem.attempt()
        return {"prompt": problem.prompt, "completion": outcome, "desirable": outcome == problem.answer}


KIND = LabelledRows()
