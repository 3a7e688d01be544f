"""External data of a stage's record: the files, Hub names and tasks that it read, with their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from alignment_core.artifacts import Provenance
from alignment_core.data.pin import PinnedSource
from alignment_core.errors import UserError
from alignment_core.execution.base import load_stage
from alignment_core.stages.base_model import BaseModelConfig
from alignment_core.stages.merge_adapter import MergeAdapterConfig


@dataclass(frozen=True)
class Source:
    """A file, Hub name or task that a stage read from outside the store."""

    path: str
    """A file, an address, a name on the Hub, or a built-in or library's task."""
    sha256: str | None = None
    """Digest of a file."""
    rows: int | None = None
    """Number of its rows, if the record has it."""
    commit: str | None = None
    """Commit of a Hub name."""
    version: str | None = None
    """Version of a file at an address: its ETag, or another identification by the server."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings of reading it that differ from the defaults."""


def sources_of(record: Provenance) -> tuple[Source, ...]:
    """The files with their digests or versions, Hub names with their commits, and tasks that the stage of a record read."""
    try:
        if record.stage == "base_model":
            base = BaseModelConfig.model_validate(record.config)
            return tuple(_of_model(str(base.model.name), base))
        if record.stage == "merge_adapter":
            pinned_adapter = MergeAdapterConfig.model_validate(record.config)
            return tuple(_of_model(pinned_adapter.adapter, pinned_adapter))
        if record.stage == "dataset":
            pinned = [PinnedSource.model_validate(entry) for entry in record.config.get("sources", ())]
            return tuple(source for source_pin in pinned for source in _of_rows(source_pin))
    except ValidationError:  # another version wrote it
        return ()
    return tuple(_listed(record.config.get("sources")))


def _of_model(name: str, config: BaseModelConfig | MergeAdapterConfig) -> Iterator[Source]:
    if config.commit:
        yield Source(name, commit=config.commit)
    for file, digest in sorted(config.files.items()):
        yield Source(f"{name.rstrip('/')}/{file}", sha256=digest)
    for _, remote in sorted(config.remote.items()):
        yield Source(remote.address, version=remote.version)


def _of_rows(pinned: PinnedSource) -> Iterator[Source]:
    origin = {pinned.source.field, "revision"}
    settings = tuple(_leaves(pinned.source.model_dump(mode="json", exclude_defaults=True, exclude=origin)))
    for file in pinned.files:
        yield Source(file.path, sha256=file.sha256, settings=settings)
    for remote in pinned.remote:
        yield Source(remote.address, version=remote.version, settings=settings)
    if not pinned.files and not pinned.remote:
        yield Source(pinned.name, commit=pinned.hub_commit, settings=settings)


def _listed(entries: Any) -> Iterator[Source]:
    """Paths, digests and numbers of rows, as the batch of a night has them."""
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            rows, digest = entry.get("rows"), entry.get("sha256")
            yield Source(
                entry["path"],
                sha256=digest if isinstance(digest, str) else None,
                rows=rows if isinstance(rows, int) else None,
            )


def settings_of(record: Provenance) -> dict[str, Any]:
    """The settings of a stage that differ from its defaults, by path, such as ``training.learning_rate``; no sources.

    All settings, where this version does not know the stage or its configuration.
    """
    try:
        config: BaseModel = load_stage(record.stage).config.model_validate(record.config)
        settings = config.model_dump(mode="json", exclude_defaults=True)
    except (UserError, ValidationError):
        settings = record.config
    read = {"sources", "files", "remote", "commit", "data.sources", "model.name", "adapter"}  # listed by sources_of
    return {path: value for path, value in _leaves(settings) if path not in read}


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The ends of nested mappings; lists are ends."""
    for name, inner in sorted(value.items()):
        inner_path = f"{path}.{name}" if path else name
        if inner_path in ("files", "remote") or not isinstance(inner, Mapping):
            yield inner_path, inner
        else:
            yield from _leaves(inner, inner_path)
