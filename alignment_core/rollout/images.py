"""Images of prompts, on their way to engines, rewards and trainers: by the paths of their files.

Paths stay those of the stage's input, not strings, because another machine fetches what such a path leads to
(:mod:`alignment_core.artifacts.portable_paths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alignment_core.data.images import COLUMN, FOLDER, keep_images


def images_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Digests (str) or paths (Path) of the images of a row, whose column may be a list, an array, or absent."""
    images = row.get(COLUMN)
    return () if images is None else tuple(images)


def digests_of(row: Mapping[str, Any]) -> list[str]:
    """Digests of the images of a row, which may have paths: files have the names of their digests."""
    return [Path(image).name for image in images_of(row)]


def have_images(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any row has an image."""
    return any(images_of(row) for row in rows)


def with_paths(rows: Iterable[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows of an artifact in ``folder`` with the paths of their images in place of the digests."""
    return [
        {**row, COLUMN: tuple(folder / FOLDER / digest for digest in images_of(row))} if COLUMN in row else row
        for row in rows
    ]


def copy_images(rows: Iterable[Mapping[str, Any]], source: Path, target: Path) -> None:
    """Copy the images of ``rows`` from the artifact in ``source`` into the one in ``target``, which has these rows."""
    keep_images((digest for row in rows for digest in digests_of(row)), source / FOLDER, target / FOLDER)
