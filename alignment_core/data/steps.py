"""Answers in steps: how a text is cut into them, and how they are laid out for a model that judges each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.data.messages import Messages
    from alignment_core.data.template import Ids, Renderer, Tools

STEPS = "process_reward_model.json"
"""The file beside the weights of a process reward model that says how it reads steps: the fields of
:class:`~alignment_core.recipes.sections.process_reward_model.StepsConfig`."""


@dataclass(frozen=True)
class StepLayout:
    """The separator of steps, and the token at which each step is judged."""

    separator: str = "\n"
    """Ends a step: an answer is cut at it, and each step is followed by it."""
    placeholder: str | None = None
    """Text of the one token behind the separator at which a step is judged. None: the step's last token."""
    placeholder_prefix: str | None = None
    """Text between a step and its placeholder, which the separator then follows. None: the separator."""
    answer_prefix: str = ""
    """Text between a prompt and the first step without a chat template."""

    def split(self, answer: str) -> list[str]:
        """The steps of an answer, without the separators; none of them is blank."""
        return [step for step in answer.split(self.separator) if step.strip()]

    def trimmed(self, step: str) -> str:
        """A step without separators at its end, which data sets may have put there."""
        while step.endswith(self.separator):
            step = step.removesuffix(self.separator)
        return step

    def ends(self, answer: str) -> list[int]:
        """For each step how many characters of the answer there are up to its end, the separator included."""
        ends = []
        place = 0
        for part in answer.split(self.separator):
            place = min(place + len(part) + len(self.separator), len(answer))
            if part.strip():
                ends.append(place)
        return ends

    def prompt(self, renderer: Renderer, prompt: str | Messages, tools: Tools | None) -> str:
        """The rendered text before the first step."""
        _, text = renderer.prompt(prompt, tools)
        return text if renderer.template else text + self.answer_prefix

    def lay_out(self, renderer: Renderer, prompt: str, steps: Sequence[str]) -> tuple[Ids, Ids, list[int]]:
        """Token ids of the rendered ``prompt`` and of the steps behind it, each with its separator and placeholder, and the
        place among the latter at which each step is judged.

        Raises ValueError for a step that contains the separator elsewhere than at its end, and UserError for a placeholder
        that is not one token.
        """
        mark = [] if self.placeholder is None else [one_token(renderer, self.placeholder, "placeholder")]
        steps = [self.trimmed(step) for step in steps]
        for step in steps:
            if not step.strip():
                raise ValueError(f"a step is nothing but the separator {self.separator!r}")
            if self.separator in step:
                raise ValueError(
                    f"a step contains the separator {self.separator!r}, at which answers are cut into steps: {step[:40]!r}"
                )
        texts = [step + self.separator for step in steps]
        if self.placeholder_prefix is not None:
            texts = [(self.separator if n else "") + step + self.placeholder_prefix for n, step in enumerate(steps)]
        parts = [text + (self.placeholder or "") for text in texts]
        prompt_ids, ids, ends = renderer.continued(prompt, parts)
        # then the tokenizer merged the placeholder with its neighbours
        if mark and any(ids[end - 1 : end] != mark for end in ends):
            prompt_ids, answer, ends = renderer.continued(prompt, texts)
            ids = [token for first, end in pairwise([0, *ends]) for token in [*answer[first:end], *mark]]
            ends = [end + number for number, end in enumerate(ends, start=1)]
        return prompt_ids, ids, [end - 1 for end in ends]


def one_token(renderer: Renderer, text: str, field: str) -> int:
    """The id of a text that has to be one token. Raises UserError that names the ``field`` which gave it."""
    ids = renderer.encode(text)
    if len(ids) != 1:
        raise UserError(f"`{field}`: {text!r} is {len(ids)} tokens of this tokenizer; give a text that is one")
    return ids[0]


def verdict_ids(renderer: Renderer, tokens: tuple[str, str], field: str) -> tuple[int, int]:
    """The ids of the good and the bad verdict. Raises UserError if they are not two tokens of the tokenizer."""
    good, bad = (one_token(renderer, token, field) for token in tokens)
    if good == bad:
        raise UserError(f"`{field}`: {tokens[0]!r} and {tokens[1]!r} are the same token of this tokenizer")
    return good, bad
