"""Which rendered examples become rows of the table, where the others are cut, and why some fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.data.template import Pair, Prompt, Renderer, TrainingText
from alignment_core.recipes.sections.data import DataConfig

REASONS = {
    "malformed": "could not be read as an example",
    "empty_completion": "have an answer without text",
    "identical_pair": "have the same chosen and rejected answer",
    "prompt_too_long": "have a prompt longer than max_prompt_length",
    "too_long": "are longer than max_length",
    "identical_after_truncation": "have answers that do not differ within max_length",
    "duplicate_of_test": "repeat a row of the test split",
}
"""Why a row may fall, in words that continue "12 rows …"."""

Columns = dict[str, Any]
SHORTENED = "shortened"
"""Among the columns of a row of which something was cut off; no column of the table."""


@dataclass(frozen=True)
class Limits:
    """The length limits of a data set, and the means to cut."""

    config: DataConfig
    renderer: Renderer
    bos: int | None

    def training_text(self, text: TrainingText) -> Columns | str:
        """Columns of an SFT row, or the reason why it falls."""
        if text.empty:
            return "empty_completion"
        prompt = text.loss_mask.index(1)
        reason = self._exceeded(prompt, len(text.input_ids) - prompt)
        if reason is None:
            return {"input_ids": text.input_ids, "loss_mask": text.loss_mask, "text": text.text}
        if self.config.overlong == "drop":
            return reason
        head, tail = self._rooms(prompt, len(text.input_ids) - prompt)
        kept = cut_prompt(text.input_ids[:prompt], head, self.bos)
        ids = kept + text.input_ids[prompt : prompt + tail]
        mask = [0] * len(kept) + text.loss_mask[prompt : prompt + tail]
        return {"input_ids": ids, "loss_mask": mask, "text": self.renderer.decode(ids), SHORTENED: True}

    def pair(self, pair: Pair, margin: float | None) -> Columns | str:
        """Columns of a preference row, or the reason why it falls."""
        if not pair.chosen.strip() or not pair.rejected.strip():
            return "empty_completion"
        if pair.chosen_ids == pair.rejected_ids:
            return "identical_pair"
        columns = {**vars(pair), "margin": margin}
        longest = max(len(pair.chosen_ids), len(pair.rejected_ids))
        reason = self._exceeded(len(pair.prompt_ids), longest)
        if reason is None:
            return columns
        if self.config.overlong == "drop":
            return reason
        head, tail = self._rooms(len(pair.prompt_ids), longest)
        self._cut(columns, "prompt", cut_prompt(pair.prompt_ids, head, self.bos))
        self._cut(columns, "chosen", pair.chosen_ids[:tail])
        self._cut(columns, "rejected", pair.rejected_ids[:tail])
        return "identical_after_truncation" if columns["chosen_ids"] == columns["rejected_ids"] else columns

    def prompt(self, prompt: Prompt, label: str | None, task: str | None) -> Columns | str:
        """Columns of a prompt row, or the reason why it falls. At least one token is left for the answer."""
        columns = {**vars(prompt), "label": label, "task": task}
        limit, longest = self.config.max_prompt_length, self.config.max_length - 1
        if len(prompt.prompt_ids) <= min(limit or longest, longest):
            return columns
        if self.config.overlong == "drop":
            return "prompt_too_long" if limit and len(prompt.prompt_ids) > limit else "too_long"
        self._cut(columns, "prompt", cut_prompt(prompt.prompt_ids, min(limit or longest, longest), self.bos))
        return columns

    def _exceeded(self, prompt: int, completion: int) -> str | None:
        if self.config.max_prompt_length and prompt > self.config.max_prompt_length:
            return "prompt_too_long"
        return "too_long" if prompt + completion > self.config.max_length else None

    def _rooms(self, prompt: int, completion: int) -> tuple[int, int]:
        return rooms(prompt, completion, self.config.max_length, self.config.max_prompt_length)

    def _cut(self, columns: Columns, name: str, ids: list[int]) -> None:
        """Put shorter ids and, as text is a view of ids, their text."""
        if ids != columns[f"{name}_ids"]:
            columns |= {f"{name}_ids": ids, name: self.renderer.decode(ids), SHORTENED: True}


def cut_prompt(ids: Sequence[int], room: int, bos: int | None) -> list[int]:
    """The last ``room`` tokens of a prompt; a beginning-of-sequence token stays, as models lean on it."""
    if len(ids) <= room:
        return list(ids)
    if bos is not None and ids[0] == bos and room > 1:
        return [bos, *ids[len(ids) - room + 1 :]]
    return list(ids[len(ids) - room :])


def rooms(prompt: int, completion: int, max_length: int, max_prompt_length: int | None) -> tuple[int, int]:
    """Tokens that prompt and completion may keep.

    The prompt first obeys its own limit. What is then still over max_length is taken from the completion's end, but
    only down to half of max_length; the rest is taken from the prompt. So neither side can crowd out the other.
    """
    prompt = min(prompt, max_prompt_length or prompt)
    completion = min(completion, max(max_length - prompt, max_length // 2))
    return min(prompt, max_length - completion), completion
