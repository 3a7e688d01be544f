"""Images that environments and agents show to the policy: kept by their digests in one folder, and as tokens of its texts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from alignment_core.artifacts.portable_paths import carried
from alignment_core.data.image_reader import ImageReader
from alignment_core.data.image_tokens import Processor, tokens_of_images
from alignment_core.data.images import images_in_messages, keep_images
from alignment_core.data.message_fields import in_parts
from alignment_core.data.messages import Messages
from alignment_core.data.template import Renderer


class ObservedImages:
    """The images of a run's observations. Calls may come from any thread."""

    def __init__(self, processor: Processor, folder: Path) -> None:
        """``folder`` gets the images; ``processor`` is that of the policy."""
        self._processor = processor
        self._folder = folder
        self._reader = ImageReader(folder)
        self._writing = threading.Lock()
        self.tokens = tokens_of_images(processor, folder)
        """What a renderer of messages with these images needs."""

    def read(self, messages: Messages) -> tuple[Messages, tuple[Path, ...]]:
        """Messages whose images are ``data:`` URLs: with digests in their place, and the files. Raises ValueError for an image
        that cannot be used."""
        read = self._reader.of_row(lambda: None)
        with self._writing:
            parts = [in_parts(message, f"messages[{number}]", read) for number, message in enumerate(messages)]
        return parts, tuple(carried(self._folder / digest) for digest in images_in_messages(parts))

    def add(self, images: Sequence[Path]) -> None:
        """Add images of a prompt, files named by their digests."""
        with self._writing:
            for image in images:
                keep_images([image.name], image.parent, self._folder)

    def places(self, renderer: Renderer, images: Sequence[Path]) -> list[int]:
        """The tokens at the places of these images in a text of the ``renderer``."""
        token = self._processor.image_token_id
        assert renderer.images is not None
        return [token] * sum(renderer.images.count(image.name) for image in images)
