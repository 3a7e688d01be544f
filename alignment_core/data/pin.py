"""Pinning: resolve, once and before anything is read, the exact content that a data source refers to; and its rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.canonical import derive_seed
from alignment_core.data import formats
from alignment_core.data.addresses import RemoteFile
from alignment_core.data.kinds import Kind
from alignment_core.data.origins import LocatedRow, origin_of
from alignment_core.data.pinned_images import digest_of_images
from alignment_core.data.sample_rows import sample_rows
from alignment_core.errors import DataError
from alignment_core.recipes.sections.data import DataSource


class PinnedFile(BaseModel):
    """A file and the digest of its bytes at the time of pinning."""

    model_config = ConfigDict(frozen=True)

    path: str
    sha256: str
    size: int


class PinnedSource(BaseModel):
    """A source whose content can no longer change unnoticed."""

    model_config = ConfigDict(frozen=True)

    source: DataSource
    files: tuple[PinnedFile, ...] = ()
    remote: tuple[RemoteFile, ...] = Field((), exclude_if=lambda files: not files)
    """Files at an address."""
    hub_commit: str | None = None
    images: str | None = Field(None, exclude_if=lambda digest: digest is None)
    """Digest of the images that rows of the ``files`` name by paths."""
    notes: tuple[str, ...] = Field((), exclude_if=lambda notes: not notes)
    """Sentences about files of the folder that are left out; they do not decide the rows."""
    first: int | None = Field(None, exclude=True)
    """Read only this many rows, from the beginning: for checks."""

    def content(self) -> dict[str, Any]:
        """The part of a stage key that identifies the rows of this source."""
        source, origin = self.source, origin_of(self.source)
        return {
            "made": None if source.path else {source.field: source.origin},
            **origin.content(self),
            **source.model_dump(mode="json", include=_MEANING),
            **({"keep_columns": list(source.keep_columns)} if source.keep_columns else {}),
            **({"held_out": True} if source.held_out else {}),
            **({"images": self.images} if self.images else {}),
        }

    @property
    def name(self) -> str:
        """Name of this source in rows and statistics; the same on every machine."""
        return origin_of(self.source).name(self)

    def read(self, index: int, seed: int, kind: Kind, scratch: Path | None = None) -> Iterator[LocatedRow]:
        """The rows of this source, number ``index`` of its data set: at most ``rows``, in the order of the source. ``scratch``
        is a folder for a temporary file.

        Raises DataError if a whole file cannot be read, or a file or an image has changed since it was pinned, UserError if the
        source has no rows of this kind.
        """
        origin, count = origin_of(self.source), self.source.rows
        rows = islice(self._checked(origin.read(self, derive_seed(seed, index), kind)), self.first)
        if count is not None and origin.samples_rows:
            return sample_rows(rows, count, seed, scratch)
        return islice(rows, count)

    def digest_of_images(self) -> str | None:
        """The present digest of the images that rows of the ``files`` name by paths; None if they name none."""
        return digest_of_images([Path(file.path) for file in self.files], self.source.columns)

    def _checked(self, rows: Iterator[LocatedRow]) -> Iterator[LocatedRow]:
        """The rows; DataError behind the last one if images are no longer those that were pinned."""
        yield from rows
        if self.images and self.first is None and self.digest_of_images() != self.images:
            raise DataError(f"{self.name}: images of its rows are gone or have changed since this run started")


_MEANING = {"format", "columns", "split", "subset", "rows", "weight", "options"}


def pin(source: DataSource, images: bool = True) -> PinnedSource:
    """Resolve a source; ``images`` says whether its rows may have any. Raises UserError, in one sentence, for anything that
    could not be read later."""
    formats.check_columns(source.columns)
    pinned = PinnedSource(source=source, **origin_of(source).pin(source))
    return pinned.model_copy(update={"images": pinned.digest_of_images()}) if images and pinned.files else pinned
