"""The images that rows of local files name by paths: their content is part of what a source stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of, digest_of_file
from alignment_core.data.files import open_unpacked, read_file
from alignment_core.data.images import digest_in
from alignment_core.data.message_fields import IMAGE_FIELDS, IMAGE_PARTS
from alignment_core.recipes.paths import is_address, row_suffix

COLUMNS = ("images", "image")
"""Columns of a row's own images, where the recipe names none."""
_NEEDLE = b'"image'
_NAMES_IMAGES = re.compile(rb'"(images?|image_url)"\s*:|"type"\s*:\s*"(image|input_image)')
_CHUNK, _OVERLAP = 1 << 20, 64


def digest_of_images(files: Sequence[Path], columns: Mapping[str, str]) -> str | None:
    """A digest of the names in rows and the contents of all images of the ``files``; None if no row names a path.

    ``columns`` are those of the recipe by role. Images that are missing count as missing.
    """
    names = (columns["images"],) if "images" in columns else COLUMNS
    named = {
        (path, str(file.parent)) for file in files if _may_name_images(file, names) for path in _paths(file, names)
    }
    contents = [[path, _digest(Path(folder, path))] for path, folder in sorted(named)]
    return digest_of(contents) if contents else None


def _digest(path: Path) -> str | None:
    try:
        return digest_of_file(path) if path.is_file() else None
    except OSError:
        return None


def _may_name_images(file: Path, columns: Sequence[str]) -> bool:
    """Whether a file has fields of images, without parsing its rows."""
    suffix = row_suffix(file.name)
    if suffix == ".csv":
        return bool(next((row for _, row in _readable(file)), {}).keys() & set(columns))
    if suffix in (".parquet", ".arrow"):
        schema = _schema(file)
        return schema is not None and ("image" in str(schema) or bool(set(schema.names) & set(columns)))
    try:
        with open_unpacked(file) as content:
            before = b""
            while chunk := content.read(_CHUNK):
                window = before + chunk
                if _NEEDLE in window and _NAMES_IMAGES.search(window):
                    return True
                before = window[-_OVERLAP:]
    except (OSError, EOFError, ValueError):
        return False  # reading the rows says why
    return False


def _schema(file: Path) -> Any:
    """The schema of a Parquet or Arrow file; None if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if row_suffix(file.name) == ".parquet":
            return pq.read_schema(file)
        with pa.memory_map(str(file)) as content:
            try:
                return pa.ipc.open_stream(content).schema
            except pa.ArrowInvalid:
                return pa.ipc.open_file(content).schema
    except (pa.ArrowException, OSError):
        return None  # reading the rows says why


def _paths(file: Path, columns: Sequence[str]) -> Iterator[str]:
    """The paths that rows of a file name."""
    for _, row in _readable(file):
        for name, value in row.items():
            for image in (value if isinstance(value, list) else [value]) if name in columns else _in_parts(value):
                path = image.get("path") if isinstance(image, Mapping) and image.get("bytes") is None else image
                if (
                    isinstance(path, str)
                    and path
                    and not (path.startswith("data:") or is_address(path) or digest_in(path))
                ):
                    yield path


def _in_parts(value: Any) -> Iterator[Any]:
    """The images in parts of messages, at any depth."""
    if isinstance(value, list):
        for item in value:
            yield from _in_parts(item)
    elif isinstance(value, Mapping):
        if value.get("type") in IMAGE_PARTS or "type" not in value:
            images = [value[field] for field in IMAGE_FIELDS if value.get(field) is not None]
            yield from (
                image.get("url") if isinstance(image, Mapping) and "url" in image else image for image in images
            )
        if isinstance(value.get("content"), list):
            yield from _in_parts(value["content"])


def _readable(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The well-formed rows of a file, up to where it cannot be read."""
    from alignment_core.errors import AlignmentError

    try:
        for number, row in read_file(file):
            if isinstance(row, dict):
                yield number, row
    except (AlignmentError, OSError, RecursionError):
        return  # reading the rows says why
