"""Opening a store: from its path or URI to a Store whose backend has been shown to keep the contract."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.group_access import warn_of_closed
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import CACHE, FORMAT, LAYOUT, TEMPORARY, check_path
from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import Workspace, local_name
from alignment_core.errors import EnvironmentFault, NotFound, StoreError, UserError
from alignment_core.files import write_whole
from alignment_core.home import align_home

FORMAT_VERSION = 1
_PROBE_SECONDS = 3600.0
"""Seconds for which a server that passed the probe of conditional writes is not probed again."""
_CHOSEN = "default-store"
"""File below ALIGN_HOME that names a store."""


def open_store(uri: str | Path | None = None, writes: bool = True) -> Store:
    """The store at a folder path, or at a ``file://``, ``s3://bucket/prefix`` or ``hf://organisation/name`` URI.

    None: the :func:`default_store`.

    A missing store is created, and a write shows that it can be used. Without ``writes`` nothing is written, so that a store
    on a full disk can be read, and space can be freed there: a missing store is empty.

    Raises UserError for a path that is not a store or of an unsupported kind, EnvironmentFault when it
    cannot hold a store.
    """
    if uri == "":
        raise UserError("the store has an empty name: name a folder, or leave the name out")
    uri = uri or default_store()
    scheme, separator, _ = str(uri).partition("://")
    if separator and scheme not in _OPENERS:
        raise UserError(
            f"{uri}: there are no {scheme}:// stores; name a folder, or a URI that begins with "
            f"{', '.join(f'{known}://' for known in sorted(_OPENERS))}"
        )
    backend, workspace = _OPENERS[scheme if separator else "file"](uri)
    check_backend(backend, writes)
    return Store(backend, workspace)


def folder_of(uri: str | Path | None) -> Path | None:
    """The folder of a store, by default of the :func:`default_store`; None for a store on a server."""
    uri = uri or default_store()
    scheme, separator, _ = str(uri).partition("://")
    return _folder(uri) if not separator or scheme == "file" else None


def default_store() -> str | Path:
    """``$ALIGN_STORE``, the chosen store (:func:`choose_store`), or ``$ALIGN_HOME/store``."""
    return os.environ.get("ALIGN_STORE") or chosen_store() or align_home() / "store"


def chosen_store() -> str | None:
    """The store that was chosen for this ALIGN_HOME; None if there is none."""
    with suppress(FileNotFoundError):
        return (align_home() / _CHOSEN).read_text().strip() or None
    return None


def choose_store(uri: str | None) -> None:
    """Make a store the default of this ALIGN_HOME; None: ``$ALIGN_HOME/store``."""
    path = align_home() / _CHOSEN
    with explained("write", path):
        if uri is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, lambda file: file.write(f"{uri}\n".encode()))


def _open_folder(uri: str | Path) -> tuple[Backend, Workspace]:
    root = _folder(uri)
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file: a store is a folder")
    backend = FolderBackend(root)
    warn_of_closed(backend.root)
    return backend, Workspace(backend.root) if _takes_copies(backend.root) else _workspace_of(backend)


def _open_s3(uri: str | Path) -> tuple[Backend, Workspace]:
    from alignment_core.artifacts.s3 import S3Backend  # botocore takes a while to import

    bucket, _, prefix = str(uri).removeprefix("s3://").strip("/").partition("/")
    try:
        check_path(f"{bucket}/{prefix}" if prefix else bucket)
    except ValueError as error:
        raise UserError(f"{uri}: write s3://bucket or s3://bucket/prefix; {error}") from None
    backend = S3Backend(bucket, f"{prefix}/" if prefix else "")
    return backend, _workspace_of(backend)


def _open_hub(uri: str | Path) -> tuple[Backend, Workspace]:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from alignment_core.artifacts.hub import HubBackend  # the Hub's client takes a while to import

    name = str(uri).removeprefix("hf://").strip("/")
    try:
        if name.count("/") != 1:
            raise ValueError("these are exactly two parts, and all of the dataset repo is the store")
        validate_repo_id(name)
    except (ValueError, HFValidationError) as error:
        raise UserError(f"{uri}: write hf://organisation/name; {error}") from None
    backend = HubBackend(name)
    return backend, _workspace_of(backend)


def _takes_copies(root: Path) -> bool:
    """Whether this user may keep copies of artifacts and temporary files in the folder of a store."""
    folders = [folder if folder.is_dir() else root for folder in (root / CACHE, root / TEMPORARY)]
    return not root.is_dir() or all(os.access(folder, os.W_OK | os.X_OK) for folder in folders)


def _workspace_of(backend: Backend) -> Workspace:
    """This machine's files of a store that is not on its file system, or that this user may only read."""
    return Workspace(align_home() / "stores" / local_name(backend.uri))


_OPENERS: dict[str, Callable[[str | Path], tuple[Backend, Workspace]]] = {
    "file": _open_folder,
    "hf": _open_hub,
    "s3": _open_s3,
}


def check_backend(backend: Backend, writes: bool = True) -> None:
    """Refuse a place that holds other files or a store of another format, or that ignores conditional writes."""
    new, content = False, b""
    try:
        content = backend.read(FORMAT)
    except NotFound:
        new = True
    if not new:
        _check_format(backend.uri, content)
    for stored in backend.list("") if new else ():
        if not stored.path.startswith(LAYOUT):
            raise UserError(
                f"{backend.uri} holds other files ({stored.path}) and is not a store: choose an empty or new one"
            )
    if writes and (new or not (backend.few_writes or _probed_lately(backend))):
        _probe(backend)
        _remember_probe(backend)
    if writes and new:
        backend.put(FORMAT, json.dumps({"format": FORMAT_VERSION}).encode())
        _check_format(backend.uri, backend.read(FORMAT))


def _check_format(uri: str, content: bytes) -> None:
    try:
        version = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        raise StoreError(f'{FORMAT} in {uri} is damaged: it should say {{"format": 1}}') from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{uri} has store format {version}, this version reads format {FORMAT_VERSION}: "
            "use the version that wrote it"
        )


def _probed_lately(backend: Backend) -> bool:
    """Whether a server passed the probe of this ``ALIGN_HOME`` within an hour. Folders are probed each time, which is cheap."""
    try:
        return bool(backend.endpoint) and 0 <= time.time() - _mark_of(backend).stat().st_mtime < _PROBE_SECONDS
    except OSError:
        return False


def _remember_probe(backend: Backend) -> None:
    with suppress(OSError):  # the next process probes again
        if backend.endpoint:
            mark = _mark_of(backend)
            make_like_parent(mark.parent)
            mark.touch()


def _mark_of(backend: Backend) -> Path:
    return align_home() / "probed" / local_name(f"{backend.endpoint}/{backend.uri}")


def _probe(backend: Backend) -> None:
    probe = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
    try:
        first = backend.put(probe, b"first")
        if first is None or backend.put(probe, b"second") or backend.put(probe, b"second", replaces="another"):
            raise EnvironmentFault(
                f"{backend.uri} ignores conditional writes, so that two writers could overwrite each other: "
                "use storage that can create an object only if it is absent, and replace it only if it is the one that was read"
            )
    finally:
        backend.delete(probe)


def _folder(uri: str | Path) -> Path:
    if isinstance(uri, Path):
        return uri.expanduser().absolute()
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UserError(f"{uri}: a file URI has three slashes and an absolute path, such as file:///data/store")
    return Path(unquote(parts.path))
