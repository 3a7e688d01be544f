"""Images of rows by the digests of their files: in messages, in texts, and in the folder of a data set.

A part of a message's content is ``{"type": "image", "image": "sha256:…"}`` once its row is read. A row of a table has the
digests in :data:`COLUMN`, in the order of their tokens; the files are in :data:`FOLDER`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from alignment_core.files import write_whole

Messages = list[dict[str, Any]]
FOLDER = "images"
"""In the folder of a data set: its images, each once, named by the hex digits of its digest."""
COLUMN = "images"
"""The column with the hex digests of a row's images. Tables without an image do not have it."""
PREFIX = "sha256:"
_OPENS, _CLOSES = "\U000f1a6e", "\U000f1a6f"
"""Private characters around the digest of an image in a rendered text: no text of a row has them."""
_MARK = re.compile(f"{_OPENS}([0-9a-f]{{64}}){_CLOSES}")
_REFERENCE = re.compile(f"{PREFIX}([0-9a-f]{{64}})")
_SHOWN_DIGITS = 12


def with_image_column(columns: Mapping[str, str], has_images: bool) -> Mapping[str, str]:
    """The ``columns`` of a table and their types, with that of images if any row has one."""
    return {**columns, COLUMN: "texts"} if has_images else columns


def image_part(digest: str) -> dict[str, str]:
    """The part of a message for an image."""
    return {"type": "image", "image": PREFIX + digest}


def digest_in(reference: object) -> str | None:
    """The hex digits of a reference by digest, as :func:`image_part` writes it; None for other values."""
    match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    return match[1] if match else None


def is_image(part: object) -> bool:
    """Whether a part of a message that was read is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def images_in_messages(messages: Messages | str | None) -> tuple[str, ...]:
    """The hex digests of the images in messages, in their order."""
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if is_image(part)]
    return tuple(str(part["image"]).removeprefix(PREFIX) for part in parts)


def mark(digest: str) -> str:
    """The stand-in for an image in a rendered text."""
    return f"{_OPENS}{digest}{_CLOSES}"


def has_marks(text: str) -> bool:
    """Whether a text has a character that only stand-ins for images have."""
    return _OPENS in text or _CLOSES in text


def marks_in(text: str) -> list[re.Match[str]]:
    """The stand-ins in a rendered text; group 1 is the digest."""
    return list(_MARK.finditer(text)) if _OPENS in text else []


def images_in(text: str) -> tuple[str, ...]:
    """The hex digests of the images of a rendered text, in their order."""
    return tuple(match[1] for match in marks_in(text))


def shown(text: str) -> str:
    """A rendered text for people: ``[image sha256:0123456789ab]`` in the place of each stand-in."""
    return _MARK.sub(lambda match: image_label(match[1]), text) if _OPENS in text else text


def image_label(digest: str) -> str:
    """An image in a text for people."""
    return f"[image {PREFIX}{digest[:_SHOWN_DIGITS]}]"


def keep_images(digests: Iterable[str], source: Path, target: Path) -> None:
    """Put images of one folder of images into another, by a link where the file system allows it."""
    for digest in sorted(set(digests)):
        target.mkdir(parents=True, exist_ok=True)
        if (target / digest).exists():
            continue
        with suppress(OSError):
            os.link(source / digest, target / digest)
            continue
        with (source / digest).open("rb") as content:
            write_whole(target / digest, partial(shutil.copyfileobj, content))
