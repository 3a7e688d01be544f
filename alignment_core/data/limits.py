"""Why a rendered example is dropped, and where one that is too long is truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment_core.data.image_tokens import CUT
from alignment_core.data.images import COLUMN, images_in
from alignment_core.data.template import Renderer, TrainingText
from alignment_core.recipes.sections.data import DataConfig

REASONS = {
    "malformed": "could not be read as an example",
    "empty_completion": "have an answer without text",
    "prompt_too_long": "have a prompt longer than max_prompt_length",
    "too_long": "are longer than max_length",
    "different_prompts": "have chosen and rejected conversations that differ before their last message",
    CUT: "would lose an image within max_length or max_prompt_length",
    "duplicate_of_test": "repeat a row of the test split",
    "prompt_of_test": "have a prompt of a source that is held out",
}
"""Why a row of any kind may be dropped, in words that continue "12 rows …"."""

SHORTENED = "shortened"
"""Among the columns of a row of which something was cut off; no column of the table."""


@dataclass(frozen=True)
class Limits:
    """The length limits of a data set, and how to truncate."""

    config: DataConfig
    renderer: Renderer
    bos: int | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the kind of rows that are not part of ``data``."""

    def fit(self, text: TrainingText) -> dict[str, Any] | str:
        """The columns ``input_ids``, ``loss_mask`` and ``text`` of a rendered text, truncated if it is too long; or the reason
        why the row is dropped."""
        if text.empty:
            return "empty_completion"
        ids, mask, images = text.input_ids, text.loss_mask, column_of_images(text.text)
        prompt = mask.index(1)
        room = self.room(prompt, len(ids) - prompt)
        if isinstance(room, str):
            return room
        head, tail = room
        if head + tail == len(ids):
            return {"input_ids": ids, "loss_mask": mask, "text": text.text, **images}
        kept = self.cut_prompt(ids[:prompt], head)
        ids = kept + ids[prompt : prompt + tail]
        mask = [0] * len(kept) + mask[prompt : prompt + tail]
        # Decoded, not sliced: the text must be that of the remaining tokens.
        shortened = self.renderer.decode(ids, images_in(text.text))
        return {"input_ids": ids, "loss_mask": mask, "text": shortened, **images, SHORTENED: True}

    def finished(self, columns: dict[str, Any] | str) -> dict[str, Any] | str:
        """The columns of a rendered row as the table has them, or the reason why it is dropped: its images are shown in texts
        and no targets. Raises ValueError for tokens of images that are no images."""
        images = self.renderer.images
        return columns if images is None or isinstance(columns, str) else images.finished(columns)

    def room(self, prompt: int, completion: int) -> tuple[int, int] | str:
        """Tokens that a prompt and what follows it may keep, all where they fit; or the reason why the row is dropped."""
        if self.config.max_prompt_length and prompt > self.config.max_prompt_length:
            reason = "prompt_too_long"
        elif prompt + completion > self.config.max_length:
            reason = "too_long"
        else:
            return prompt, completion
        if self.config.overlong == "drop":
            return reason
        return rooms(prompt, completion, self.config.max_length, self.config.max_prompt_length)

    def cut_prompt(self, ids: Sequence[int], room: int) -> list[int]:
        """The last ``room`` tokens of a prompt; a beginning-of-sequence token stays, as models lean on it."""
        if len(ids) <= room:
            return list(ids)
        if self.bos is not None and ids[0] == self.bos and room > 1:
            return [self.bos, *ids[len(ids) - room + 1 :]]
        return list(ids[len(ids) - room :])

    def cut(self, columns: dict[str, Any], name: str, ids: list[int]) -> dict[str, Any]:
        """Put shorter ids into ``<name>_ids`` of a row and, as text is a view of ids, their text into ``<name>``."""
        if len(ids) < len(columns[f"{name}_ids"]):
            columns |= {f"{name}_ids": ids, name: self.renderer.decode(ids, images_in(columns[name])), SHORTENED: True}
        return columns


def rooms(prompt: int, completion: int, max_length: int, max_prompt_length: int | None) -> tuple[int, int]:
    """Tokens that prompt and completion may keep.

    The prompt first obeys its own limit. What is then still over max_length is taken from the completion's end, but
    only down to half of max_length; the rest is taken from the prompt. So neither side can crowd out the other.
    """
    prompt = min(prompt, max_prompt_length or prompt)
    completion = min(completion, max(max_length - prompt, max_length // 2))
    return min(prompt, max_length - completion), completion


def column_of_images(text: str) -> dict[str, Any]:
    """The column of the images that a rendered text has; no column without any."""
    images = images_in(text)
    return {COLUMN: images} if images else {}
