"""Contents of messages with images, as environments return them and agents send them: on their way to the sampler as
``data:`` URLs, because a file may change, and its process may end, before the policy's next turn."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment_core.data.image_reader import MOST_BYTES, MOST_PIXELS, content_of_file
from alignment_core.data.message_fields import named_image, names_image

Content = str | list[dict[str, Any]]
"""A text, or parts: texts, and images as ``data:`` URLs."""
WANTED = "a text, or a list with a text or a list of parts for each message, is needed"
PARTS = "`content` must be a text, or a list of parts of the types text and image_url"

PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""Modes of pictures of Pillow that a PNG file can have."""
LONGEST_URL = 4 * MOST_BYTES // 3 + 1024
"""Characters of a ``data:`` URL, which are four for three bytes."""
LONGEST_PATH = 255
"""Characters of a path that a message shows."""


def contents_of(observation: Any) -> str | list[Content]:
    """An observation for the sampler: a text, or the content of each message. Parts that are in no list of their own are one
    message. Raises TypeError for anything else, ValueError for an image that cannot be read."""
    if isinstance(observation, str):
        return observation
    if not isinstance(observation, list | tuple):
        raise TypeError(WANTED)
    contents = [observation] if observation and all(map(_is_part, observation)) else observation
    return [content if isinstance(content, str) else _parts(content) for content in contents]


def content_of_request(content: Any) -> Content:
    """The content of an agent's message: texts as one, or parts with images, which are ``data:`` URLs. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(map(_is_part, content)):
        raise ValueError(PARTS)
    if not any(map(names_image, content)):
        if not all(isinstance(part.get("text"), str) for part in content):
            raise ValueError("the policy reads only text and images")
        return "".join(part["text"] for part in content)
    return [_with_image(part, _data_url) if names_image(part) else _text(part) for part in content]


def images_for(function: Callable[..., Any], images: Sequence[str], options: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The argument ``images``, paths of a prompt's images, if the function has such a parameter and no option of this name."""
    try:
        takes_images = "images" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not known of some that are compiled
        return {}
    return {"images": [*images]} if takes_images and "images" not in options else {}


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping)


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list | tuple) or not all(map(_is_part, content)):
        raise TypeError(WANTED)
    return [_with_image(part, _encoded) if names_image(part) else _text(part) for part in content]


def _text(part: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a part of the type {part.get('type')!r} has no `text`; only text and images are read")
    return {"type": "text", "text": part["text"]}


def _with_image(part: Mapping[str, Any], encode: Callable[[Any], str]) -> dict[str, Any]:
    return {"type": "image", "image": encode(named_image(part))}


def _encoded(image: Any) -> str:
    """A ``data:`` URL of an image: a path, bytes, a picture of Pillow, or such a URL."""
    if isinstance(image, str) and image.startswith("data:"):
        return _data_url(image)
    if isinstance(image, str) and "://" in image[:LONGEST_PATH]:
        raise ValueError(
            f"the image {image[:LONGEST_PATH]!r} is an address; a path, bytes, a picture of Pillow or a data: URL is needed"
        )
    if isinstance(image, str | Path):
        image = _of_path(str(image))
    elif hasattr(image, "save") and hasattr(image, "mode"):
        image = _of_picture(image)
    if not isinstance(image, bytes):
        raise ValueError(
            f"an image is a {type(image).__name__}; a path, bytes, a picture of Pillow or a data: URL is needed"
        )
    if len(image) > MOST_BYTES:
        raise ValueError(f"an image has more than {MOST_BYTES >> 20} MiB")
    return f"data:;base64,{base64.b64encode(image).decode()}"


def _of_path(path: str) -> bytes:
    try:
        return content_of_file(path, path)
    except ValueError as error:
        if len(path) > LONGEST_PATH:
            raise ValueError(
                f"the image {path[:LONGEST_PATH]!r}… is no file; if this is base64, it needs `data:;base64,` before it"
            ) from None
        raise ValueError(f"the image {error}") from None


def _of_picture(picture: Any) -> bytes:
    """A picture of Pillow as a file."""
    if picture.width * picture.height > MOST_PIXELS:
        raise ValueError(f"an image has more than {MOST_PIXELS // 10**6} million pixels")
    file = io.BytesIO()
    (picture if picture.mode in PNG_MODES else picture.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def _data_url(image: Any) -> str:
    if not isinstance(image, str) or not image.startswith("data:"):
        raise ValueError("an image of a request must be a data: URL")
    if len(image) > LONGEST_URL:
        raise ValueError(f"an image has more than {MOST_BYTES >> 20} MiB")
    return image
