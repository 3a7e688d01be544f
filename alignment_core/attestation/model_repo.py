"""Publishing files as a repository on the Hugging Face Hub: in one commit, unless another client commits meanwhile."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alignment_core.canonical import digest_of_file
from alignment_core.errors import Conflict, EnvironmentFault, InfrastructureError, StoreError, UserError, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RepoKind = Literal["model", "dataset"]
_URI = re.compile(r"hf://([\w.-]+/[\w.-]+)")
_KEPT = (".gitattributes",)
"""Files that the Hub itself creates in a repository: never deleted."""


@dataclass(frozen=True)
class Published:
    """The place of files on the Hub."""

    repo: str
    kind: RepoKind
    commit: str
    tags: tuple[str, ...]
    url: str
    new: bool
    """Whether there is a new commit; otherwise the head of the repository already had these files."""


@dataclass(frozen=True)
class _Local:
    """A file to publish, with the digests by which the Hub may know its content."""

    content: Path | bytes
    sha256: str
    size: int

    @classmethod
    def of(cls, content: Path | bytes) -> _Local:
        if isinstance(content, bytes):
            return cls(content, hashlib.sha256(content).hexdigest(), len(content))
        return cls(content, digest_of_file(content), content.stat().st_size)

    def is_at(self, remote: Any) -> bool:
        """Whether a file of the Hub has the same content: by SHA-256 if it is large, otherwise by git's id of the blob."""
        if remote is None or remote.size != self.size:
            return False
        return bool(remote.lfs.sha256 == self.sha256) if remote.lfs else bool(remote.blob_id == self._blob_id())

    def _blob_id(self) -> str:
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def repo_of(uri: str) -> str:
    """The repository that ``hf://organisation/name`` means. Raises UserError."""
    if (match := _URI.fullmatch(uri)) is None:
        raise UserError(f"{uri!r} is not a Hub repository: write hf://organisation/name")
    return match[1]


def has_token() -> bool:
    """Whether this machine has a token for the Hub."""
    from huggingface_hub import get_token

    return get_token() is not None


def publish_files(
    repo: str,
    kind: RepoKind,
    files: Mapping[str, Path | bytes],
    tags: tuple[str, ...],
    message: str,
    private: bool = True,
) -> Published:
    """Make the main branch of a repository hold exactly ``files``, by path, in one commit, and put ``tags`` on that.

    A missing repository is created, ``private`` or not. Files that exist there are not sent again, and without changes no
    commit is made; so a publisher that was killed, or lost an answer, can simply retry. An existing tag is not moved.

    Raises Conflict when another client made a commit meanwhile, or a tag names a commit with other files; EnvironmentFault
    without a token that may write; InfrastructureError when the Hub does not answer.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    local = {path: _Local.of(content) for path, content in files.items()}
    _create_if_missing(api, repo, kind, private)
    head = _head(api, repo, kind)
    new = bool(changes := _changes(api, repo, kind, head, local))
    if new:
        head = _commit(api, repo, kind, head, changes, message, local)
    for tag in tags:
        _tag(api, repo, kind, tag, head, local)
    url = f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    return Published(repo, kind, head, tags, url, new)


def _create_if_missing(api: HfApi, repo: str, kind: RepoKind, private: bool) -> None:
    """Checked first: a token with write access to one repository need not be allowed to create any."""
    with _translate_errors(repo):
        if not api.repo_exists(repo, repo_type=kind):
            api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)


def _commit(
    api: HfApi, repo: str, kind: RepoKind, head: str, changes: list[Any], message: str, local: dict[str, _Local]
) -> str:
    """The new commit; or the existing head, if it holds these files after a lost answer or by another publisher."""
    try:
        with _translate_errors(repo):
            commit = api.create_commit(repo, changes, commit_message=message, repo_type=kind, parent_commit=head)
            return str(commit.oid)
    except (Conflict, InfrastructureError):
        newest = _head(api, repo, kind)
        if newest == head or _changes(api, repo, kind, newest, local):
            raise
        return newest


def _tag(api: HfApi, repo: str, kind: RepoKind, tag: str, commit: str, local: dict[str, _Local]) -> None:
    with _translate_errors(repo):
        present = {ref.name for ref in api.list_repo_refs(repo, repo_type=kind).tags}
        if tag not in present:
            api.create_tag(repo, tag=tag, revision=commit, repo_type=kind, exist_ok=True)
    of_artifact = {path: file for path, file in local.items() if isinstance(file.content, Path)}  # not generated ones
    remote = _files(api, repo, kind, tag)
    if different := [path for path, file in of_artifact.items() if not file.is_at(remote.get(path))]:
        raise Conflict(f"the tag {tag} of {repo} is on a commit with another {different[0]}: choose another tag")


def _changes(api: HfApi, repo: str, kind: RepoKind, revision: str, local: dict[str, _Local]) -> list[Any]:
    """The operations that turn the files at a revision into the local ones."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    remote = _files(api, repo, kind, revision)
    added = [
        CommitOperationAdd(path, file.content)
        for path, file in sorted(local.items())
        if not file.is_at(remote.get(path))
    ]
    return added + [CommitOperationDelete(path) for path in sorted(remote) if path not in local and path not in _KEPT]


def _files(api: HfApi, repo: str, kind: RepoKind, revision: str) -> dict[str, Any]:
    with _translate_errors(repo):
        tree = api.list_repo_tree(repo, recursive=True, revision=revision, repo_type=kind)
        return {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}


def _head(api: HfApi, repo: str, kind: RepoKind) -> str:
    with _translate_errors(repo):
        return str(api.repo_info(repo, repo_type=kind).sha)


@contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    """Raise the client's errors as the project's."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{repo} is not a name of a Hub repository: {error}") from None
    except HfHubHTTPError as error:
        status, message = error.response.status_code, first_line(error)
        if status in (401, 403, 404):
            raise EnvironmentFault(
                f"the Hub does not let you write to {repo} ({message}): set HF_TOKEN, or `hf auth login`, to a token that may"
            ) from error
        if status in (409, 412):
            raise Conflict(
                f"another client made a commit to {repo} meanwhile, so nothing was published ({message}): look at it, and "
                "publish again"
            ) from error
        if status == 429 or status >= 500:
            raise InfrastructureError(f"the Hub does not accept {repo} now: {message}") from error
        raise StoreError(f"the Hub refuses {repo}: {message}") from error
    except Exception as error:  # the client's transport errors have no common base of their own
        raise InfrastructureError(f"the Hub, or the connection to {repo} on it, failed: {first_line(error)}") from error
