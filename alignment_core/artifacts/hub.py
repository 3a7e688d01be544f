"""The Hub backend: a store in a private dataset repo of the Hugging Face Hub, by commits that name their parent.

``huggingface_hub`` finds the credentials (``HF_TOKEN``, the file of ``hf auth login``). Nothing is kept in that client's
cache. Downloads are checked by ``Blobs``.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.downloads import download_parts
from alignment_core.artifacts.hub_commits import Large, commits_of, is_file, version_of
from alignment_core.artifacts.hub_requests import HubRepo, NoRepo, endpoint, token, translate_errors
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import digest_of_blob, inside
from alignment_core.errors import NotFound, StoreError

_TEXT = 1 << 16
"""Bytes up to which text goes into the commit itself; the Hub decides how other files are uploaded."""
_IN_MEMORY = 1 << 20
_GIT_ATTRIBUTES = ".gitattributes"  # the Hub creates it in every repo

logging.getLogger("huggingface_hub._commit_api").addFilter(
    lambda record: "not supported by Xet" not in record.getMessage()  # Xet keeps a cache of its own; LFS does not
)


class HubBackend:
    """Objects are the files of the dataset repo ``name`` (``organisation/name``) at its branch main."""

    few_writes = True

    def __init__(self, name: str) -> None:
        self.repo = HubRepo(name)

    @property
    def uri(self) -> str:
        return self.repo.uri

    @property
    def endpoint(self) -> str:
        return endpoint()

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        self._check(path)
        return self._in_repo(lambda: self._put(path, source, replaces))

    def read(self, path: str) -> bytes:
        return b"".join(self.stream(path))

    def stream(self, path: str) -> Iterator[bytes]:
        return self.repo.pieces(self._check(path))

    def download(self, path: str, destination: Path) -> None:
        commit, size = self.repo.locate(self._check(path))
        # At one commit: the file may be replaced while its parts are on their way.
        download_parts(destination, size, lambda start, end: self.repo.pieces(path, commit, start, end))

    def stat(self, path: str) -> Object | None:
        try:
            entries = self.repo.entries("main", [self._check(path)], expand=True)
        except NoRepo:
            return None
        return next((_object(entry) for entry in entries if is_file(entry)), None)

    def list(self, prefix: str) -> Iterator[Object]:
        folder = self._check(prefix.removesuffix("/")) if prefix else ""
        try:
            files = [file for file in self.repo.below(self.repo.head()[0], folder) if is_file(file)]
        except NotFound:
            return
        for file in sorted(files, key=lambda file: str(file["path"])):
            if file["path"] != _GIT_ATTRIBUTES:
                yield _object(file)

    def delete(self, path: str, version: str | None = None) -> None:
        try:
            commits_of(self.repo).make(self._check(path), lambda: None, version)
        except NoRepo:
            return

    def now(self) -> float:
        """The Date of an HTTP response: whole seconds, as in the times of commits."""
        try:
            return self.repo.head()[1]
        except NoRepo:
            return time.time()  # there is no object yet to compare it with

    def unfinished(self) -> Iterator[Object]:
        """Nothing: the Hub does not list uploads that are in no commit."""
        yield from ()

    def drop(self, upload: Object) -> None:
        raise StoreError(f"{self.uri} has no upload {upload.path}")

    # ---------------------------------------------------------------- inside

    def _put(self, path: str, source: bytes | Path, replaces: str | None) -> str | None:
        commits = commits_of(self.repo)
        if isinstance(source, bytes):
            return commits.make(path, lambda: self._send(path, source), replaces)
        with explained("read", source):
            if source.stat().st_size <= _IN_MEMORY:
                data = source.read_bytes()
                return commits.make(path, lambda: self._send(path, data), replaces)
            existing = self.stat(path)  # checked before gigabytes are sent
            if (existing.version if existing else None) != replaces:
                return None
            return commits.make(path, lambda: self._send_file(path, source), replaces)

    def _send(self, path: str, data: bytes) -> bytes | Large:
        if _is_text(data):
            return data
        return self._sent(CommitOperationAdd(path, io.BytesIO(data))) or data

    def _send_file(self, path: str, source: Path) -> bytes | Large:
        with source.open("rb") as file:
            addition = CommitOperationAdd(path, str(source.absolute()))
            addition.path_or_fileobj = file  # an open file goes by LFS, where a path would go by Xet
            if digest := digest_of_blob(path):
                addition.upload_info.sha256 = bytes.fromhex(digest)  # else the client reads all of it once more
            return self._sent(addition) or source.read_bytes()

    def _sent(self, addition: CommitOperationAdd) -> Large | None:
        """Send a file by LFS, in parts; None if the Hub wants the bytes in the commit instead."""
        with translate_errors(f"write {self.uri}/{addition.path_in_repo}"):
            self._api.preupload_lfs_files(self.repo.name, [addition], repo_type="dataset")
        if addition.path_or_fileobj == b"":  # the client drops the content once it is sent
            return Large(addition.upload_info.sha256.hex(), addition.upload_info.size)
        return None

    def _in_repo(self, work: Callable[[], str | None]) -> str | None:
        """Do work that needs the repo; a missing one is created as a private repo."""
        try:
            return work()
        except NoRepo:
            with translate_errors(f"create the private dataset repo {self.repo.name}"):
                self._api.create_repo(self.repo.name, repo_type="dataset", private=True, exist_ok=True)
            return work()

    @property
    def _api(self) -> HfApi:
        return HfApi(endpoint=endpoint(), token=token())

    def _check(self, path: str) -> str:
        return inside(self.uri, path)


def _object(entry: dict[str, Any]) -> Object:
    changed = datetime.fromisoformat(entry["lastCommit"]["date"]).timestamp()
    return Object(entry["path"], entry["size"], changed, version_of(entry))


def _is_text(data: bytes) -> bool:
    try:
        return len(data) <= _TEXT and b"\0" not in data and bool(data.decode() or True)
    except UnicodeDecodeError:
        return False
