"""Images of the rows that `align init` reads: stand-ins for them, and copies of rows that name the same ones."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment_core.data.images import FOLDER, digest_in
from alignment_core.data.message_fields import IMAGE_FIELDS, names_image
from alignment_core.data.pinned_images import columns_of_images, may_have_messages, names_images
from alignment_core.init.rows import Row, Rows
from alignment_core.recipes.paths import is_address

FIRST = 50
"""Rows among which one with an image is searched."""
OF_IMAGES = ("path", "url")
"""Names of an image in the objects that stand for it: of ``datasets`` and OpenAI."""


def have_images(rows: Sequence[Row], columns: Mapping[str, str]) -> bool:
    """Whether any of the first rows has an image; ``columns`` are those by role that the user named."""
    return any(names_images(row, columns) for row in rows[:FIRST])


def stand_in(image: Any, name: str) -> str:
    """The digest of an image's name, for rows that are parsed without reading images."""
    return hashlib.sha256(repr(image).encode(errors="replace")).hexdigest()


def copied(rows: Sequence[Row], columns: Mapping[str, str], data: Rows, target: Path) -> list[Row] | None:
    """The rows for a file of JSON in the folder ``target``: with other relative paths, and ``data:`` URLs in place of bytes.
    None if the folder that paths begin at is not known, because the files of ``data`` are in several folders or elsewhere."""
    folders = {file.absolute().parent.resolve() for file in data.files}  # of a link to a file, that of the link

    def move(path: str) -> str:
        (folder,) = folders
        return os.path.relpath(folder / path, target.resolve())

    try:
        return [_copied(row, columns, move) for row in rows]
    except ValueError:
        return None


def _copied(row: Row, columns: Mapping[str, str], move: Callable[[str], str]) -> Row:
    copy = {}
    for name, value in row.items():
        if name in columns_of_images(columns):
            copy[name] = [_moved(image, move) for image in value] if isinstance(value, list) else _moved(value, move)
        else:
            copy[name] = _in_parts(value, move) if may_have_messages(name, columns) else value
    return copy


def _in_parts(value: Any, move: Callable[[str], str]) -> Any:
    """A value with the images in parts of messages, at any depth, moved."""
    if isinstance(value, list):
        return [_in_parts(item, move) for item in value]
    if not isinstance(value, Mapping):
        return value
    images = IMAGE_FIELDS if names_image(value) else ()
    return {name: _moved(item, move) if name in images else _in_parts(item, move) for name, item in value.items()}


def _moved(image: Any, move: Callable[[str], str]) -> Any:
    if isinstance(image, Mapping):
        if image.get("bytes") is None:
            return {name: _moved(item, move) if name in OF_IMAGES else item for name, item in image.items()}
        image = image["bytes"]
    if isinstance(image, bytes):
        return f"data:;base64,{base64.b64encode(image).decode()}"
    if digest := digest_in(image):
        return move(f"{FOLDER}/{digest}")
    if not isinstance(image, str) or not image or image.startswith("data:") or is_address(image):
        return image
    return image if Path(image).is_absolute() else move(image)
