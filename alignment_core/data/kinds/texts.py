"""Texts: all of it is a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from alignment_core.data.kinds import Format, Kind
from alignment_core.data.limits import Limits
from alignment_core.data.overlap import digest_of_text
from alignment_core.data.tasks import Problem
from alignment_core.data.template import Renderer, TrainingText


@dataclass(frozen=True)
class Text:
    """A text to train on."""

    text: str

    def prompts(self) -> tuple[str, ...]:
        return (digest_of_text(self.text),)

    def render(self, renderer: Renderer) -> TrainingText:
        """One sequence; a beginning-of-sequence token is no target."""
        return renderer.join("", [(self.text, True)], empty=not self.text.strip(), bos=renderer.bos)

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        return [limits.fit(self.render(limits.renderer))]


class Texts(Kind):
    """``loss_mask`` is 1 where the token is a target."""

    gives = "texts"
    columns = {"input_ids": "ids", "loss_mask": "mask", "text": "text", "source": "text"}
    formats: ClassVar[Mapping[str, Format]] = {"text": Format(("text",), lambda row: Text(row.text("text")))}
    native = "text"

    def sequences(self, row: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        targets = int(row["loss_mask"].sum())
        return ((len(row["loss_mask"]) - targets, targets),)

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        return {"text": problem.prompt + problem.attempt()}


KIND = Texts()
