"""Pinning: decide once, before anything is read, which exact content a data source refers to."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.data import formats
from alignment_core.data.addresses import RemoteFile
from alignment_core.data.origins import origin_of
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
    notes: tuple[str, ...] = Field((), exclude_if=lambda notes: not notes)
    """Sentences about files of the folder that are left out; they do not decide the rows."""

    def content(self) -> dict[str, Any]:
        """What this source means, for stage keys."""
        source, origin = self.source, origin_of(self.source)
        named = None if source.path else {source.field: source.origin}
        kept = {"keep_columns": list(source.keep_columns)} if source.keep_columns else {}
        held = {"held_out": True} if source.held_out else {}
        return {
            "made": named,
            **origin.content(self),
            **source.model_dump(mode="json", include=_MEANING),
            **kept,
            **held,
        }

    @property
    def name(self) -> str:
        """How rows and statistics call this source; the same on every machine."""
        return origin_of(self.source).name(self)


_MEANING = {"format", "columns", "split", "subset", "rows", "weight", "options"}


def pin(source: DataSource) -> PinnedSource:
    """Resolve a source. Raises UserError, in one sentence, for anything that could not be read later."""
    formats.check_columns(source.columns)
    return PinnedSource(source=source, **origin_of(source).pin(source))
