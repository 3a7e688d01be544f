"""Manifests: the list of files (path, size, SHA-256) whose digest is an artifact's name."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.paths import check_path, manifest_path
from alignment_core.artifacts.reference import DIGEST, KIND, Reference
from alignment_core.canonical import canonical_json, digest_of, digest_of_file
from alignment_core.errors import MAKE_IT_AGAIN, Corrupt, NotFound, UserError, one_line


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, AfterValidator(check_path)] = Field(description="POSIX path inside the artifact")
    size: int = Field(ge=0, description="bytes")
    sha256: str = Field(pattern=f"^{DIGEST.pattern}$", description="SHA-256 of the bytes, 64 hex digits")


class Manifest(BaseModel):
    """The files of an artifact. The same files have the same manifest, whatever their order on the disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(pattern=f"^{KIND.pattern}$", description="kind of artifact, such as model or dataset")
    files: tuple[FileEntry, ...] = Field(min_length=1, description="the files, sorted by path")

    @field_validator("files")
    @classmethod
    def _sorted_and_consistent(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        paths = {entry.path for entry in files}
        if len(paths) != len(files):
            raise ValueError("a path is listed twice")
        for path in paths:
            parts = path.split("/")
            if any("/".join(parts[:depth]) in paths for depth in range(1, len(parts))):
                raise ValueError(f"{path!r} lies below another file of the same artifact")
        return tuple(sorted(files, key=lambda entry: entry.path))

    @cached_property
    def digest(self) -> str:
        return digest_of(self)

    @property
    def reference(self) -> Reference:
        return Reference(self.kind, self.digest)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    @classmethod
    def of_directory(cls, directory: Path, kind: str) -> Manifest:
        """Read and hash every file below ``directory``.

        Raises UserError for symbolic links, special files, unusable names, or when there is no file at all. Empty
        subdirectories are not content and are left out.
        """
        Reference(kind, "0" * 64)  # a bad kind is refused before the expensive hashing
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: an artifact is published from a directory")
        paths = sorted(_regular_files(directory))
        if not paths:
            raise UserError(f"{directory} holds no file: an artifact has at least one")
        for path in paths:
            try:
                check_path(path.relative_to(directory).as_posix())
            except ValueError as error:
                raise UserError(f"a file below {directory} cannot be published: {error}") from error
        return cls(kind=kind, files=entries_of(directory, [path.relative_to(directory).as_posix() for path in paths]))


def entries_of(directory: Path, paths: Iterable[str]) -> tuple[FileEntry, ...]:
    """Read and hash files of a directory."""

    def entry_of(path: str) -> FileEntry:
        file = directory / path
        return FileEntry(path=path, size=file.stat().st_size, sha256=digest_of_file(file))

    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(entry_of, paths))


def read_manifest(backend: Backend, reference: Reference) -> Manifest:
    """The manifest of an artifact. Raises NotFound or Corrupt."""
    manifest = manifest_at(backend, reference.digest)
    if manifest.kind != reference.kind:
        raise NotFound(f"{backend.uri} has no {reference.short}: that digest is a {manifest.kind}")
    return manifest


def manifest_at(backend: Backend, digest: str) -> Manifest:
    """The manifest with a digest, of any kind of artifact. Raises NotFound or Corrupt."""
    path = manifest_path(digest)
    try:
        data = backend.read(path)
    except NotFound as error:
        raise NotFound(f"{backend.uri} has no artifact sha256:{digest}") from error
    return parse_manifest(backend.uri, path, data)


def parse_manifest(uri: str, path: str, data: bytes) -> Manifest:
    """The manifest that the store ``uri`` has at ``path``. Raises Corrupt for anything else."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{path} in {uri} is not a manifest: {one_line(error)}; {MAKE_IT_AGAIN}") from error
    if canonical_json(manifest) != data or manifest_path(hashlib.sha256(data).hexdigest()) != path:
        raise Corrupt(f"{path} in {uri} does not have the digest in its name; {MAKE_IT_AGAIN}")
    return manifest


def _regular_files(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                yield from _regular_files(Path(entry.path))
            elif stat.S_ISREG(mode):
                yield Path(entry.path)
            else:
                what = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a directory"
                raise UserError(f"{entry.path} is {what}: an artifact holds regular files only; copy the content")
