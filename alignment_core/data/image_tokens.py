"""The tokens of images in rendered texts, as the processor of ``transformers`` writes them.

A rendered text has a stand-in for each image (:func:`alignment_core.data.images.mark`); it becomes the image's tokens, whose
number depends on its size, when the text is encoded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from alignment_core.data.images import COLUMN, has_marks, mark, marks_in, shown

Encode = Callable[[str], list[int]]
CUT = "image_cut"
"""Why a row is dropped that would lose an image, or a part of one."""
_CACHED = 4096
"""Images whose tokens stay in memory."""


class Processor(Protocol):
    """The processor of a model's images: :class:`alignment_core.models.images.ImageProcessor`."""

    @property
    def placeholder(self) -> str:
        """The text that a chat template writes for an image."""

    @property
    def image_token_id(self) -> int:
        """The token at the places of an image's features."""

    @property
    def configured_token_ids(self) -> Collection[int]:
        """Tokens of images that a text without images cannot contain; known before the processor is loaded."""

    def expanded(self, text: str, images: Sequence[Path]) -> str:
        """The text with the tokens of each image in the place of its placeholder."""


class ImageTokens:
    """The tokens of the images in one folder, for one model."""

    def __init__(self, processor: Processor, folder: Path, encode: Encode) -> None:
        """``folder`` has the images by the hex digits of their digests; ``encode`` gives the ids of a text. The first image
        loads the ``processor``."""
        self._processor = processor
        lock = threading.Lock()  # tokenizers refuse calls from several threads that set their padding

        @functools.lru_cache(_CACHED)
        def tokens(digest: str) -> tuple[str, int]:
            with lock:
                text = processor.expanded(processor.placeholder, [folder / digest])
            return text, encode(text).count(processor.image_token_id)

        self._tokens = tokens

    def marked(self, text: str, images: Sequence[str]) -> str:
        """A text of a chat template with stand-ins in its places for images, in order.

        Raises ValueError unless it has as many places as there are ``images``.
        """
        if has_marks(text):
            raise ValueError("the text has a private character that stands for images here (U+F1A6E or U+F1A6F)")
        if not images:  # `finished` looks for places
            return text
        placeholder = self._processor.placeholder
        parts = text.split(placeholder)
        if len(parts) - 1 != len(images):
            raise ValueError(
                f"the rendered text has {len(parts) - 1} places for images ({placeholder}), and the row has "
                f"{len(images)} images"
            )
        return "".join(before + (mark(images[n]) if n < len(images) else "") for n, before in enumerate(parts))

    def count(self, digest: str) -> int:
        """Number of places of an image's features."""
        return self._tokens(digest)[1]

    def expanded(self, text: str) -> str:
        """A text with the tokens of its images in the places of their stand-ins."""
        return self.moved(text, ())[0]

    def moved(self, text: str, places: Sequence[int]) -> tuple[str, list[int]]:
        """The same, and where ``places`` in the text are then."""
        expanded, end, moved = "", 0, list(places)
        for match in marks_in(text):
            tokens = self._tokens(match[1])[0]
            expanded += text[end : match.start()] + tokens
            end = match.end()
            longer = len(tokens) - len(match[0])
            moved = [new + longer if old >= end else new for old, new in zip(places, moved, strict=True)]
        return expanded + text[end:], moved

    def collapsed(self, text: str, images: Sequence[str]) -> str:
        """A decoded text with stand-ins for the tokens of its images."""
        end = 0
        for digest in images:
            tokens = self._tokens(digest)[0]
            if (place := text.find(tokens, end)) < 0:
                break
            text = text[:place] + mark(digest) + text[place + len(tokens) :]
            end = place + len(mark(digest))
        return text

    def finished(self, columns: dict[str, Any]) -> dict[str, Any] | str:
        """The columns of a row with its images shown in texts and never as targets; or the reason why it is dropped.

        Raises ValueError for a row with tokens of images beside those of its images.
        """
        images = columns.get(COLUMN, ())
        tokens = {self._processor.image_token_id} if images else self._processor.configured_token_ids
        columns_of_ids = [list(ids) for name, ids in columns.items() if name.endswith("_ids")]
        places = sum(ids.count(token) for ids in columns_of_ids for token in tokens)
        if places and not images:
            raise ValueError(f"the rendered text has {places} places for images, and the row has 0 images")
        needed = sum(map(self.count, images))
        if places > needed:
            raise ValueError("a text has the token that stands for a part of an image; a text cannot contain it")
        if places < needed:
            return CUT
        if not images:
            return columns
        if "loss_mask" in columns:
            targets = zip(columns["input_ids"], columns["loss_mask"], strict=True)
            columns["loss_mask"] = [int(target and token not in tokens) for token, target in targets]
        return {name: shown(value) if isinstance(value, str) else value for name, value in columns.items()}


def tokens_of_images(processor: Processor | None, folder: Path | None) -> Callable[[Encode], ImageTokens] | None:
    """What a :class:`alignment_core.data.template.Renderer` needs for messages with images that are in a ``folder``
    (:data:`alignment_core.data.images.FOLDER` of a data set); None for models or rows of text alone."""
    return functools.partial(ImageTokens, processor, folder) if processor and folder else None
