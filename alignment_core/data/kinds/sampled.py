"""Completions: prompts with an answer that a policy sampled. The answer is a target as its token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from alignment_core.data.fields import Fields, kind_of
from alignment_core.data.kinds import Format, Kind, PromptExample
from alignment_core.data.kinds.texts import Texts
from alignment_core.data.limits import Limits
from alignment_core.data.tasks import Problem
from alignment_core.data.template import TrainingText


@dataclass(frozen=True)
class Completion(PromptExample):
    """A prompt and the tokens that were sampled after it, with the end of the turn if they have one.

    A chat template would not give the tokens again: templates strip answers, add empty thoughts to them or a channel before
    them, and the text of a completion lacks special tokens.
    """

    completion: str
    """The text of the tokens, without special ones."""
    completion_ids: list[int]

    def fit(self, limits: Limits) -> dict[str, Any] | str:
        renderer = limits.renderer
        prompt_ids, prompt = renderer.prompt(self.prompt, self.tools)
        ids = prompt_ids + self.completion_ids
        mask = [0] * len(prompt_ids) + [1] * len(self.completion_ids)
        text = prompt + renderer.decode(self.completion_ids)
        return limits.fit(TrainingText(ids, mask, text, empty=not self.completion.strip()))


def _of_ids(row: Fields) -> Completion:
    ids = row.value("completion_ids")
    if not isinstance(ids, list) or not all(type(number) is int and number >= 0 for number in ids):
        raise ValueError(f"`{row.name('completion_ids')}` is {kind_of(ids)}; a list of token ids is needed")
    return Completion(row.prompt(), row.text("completion"), ids, tools=row.tools())


class Sampled(Texts):
    """Texts of which the sampled tokens alone are targets."""

    gives = "sampled completions"
    formats: ClassVar[Mapping[str, Format]] = {
        "prompt_completion": Format(("prompt", "completion", "completion_ids"), _of_ids, ("tools", "images"))
    }
    native = "prompt_completion"
    takes_images = True

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return Kind.of_problem(self, problem)  # which raises: nothing was sampled


KIND = Sampled()
