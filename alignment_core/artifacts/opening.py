"""Opening a store: from its path or URI to a Store whose backend has been shown to keep the contract."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.paths import FORMAT, LAYOUT, TEMPORARY, check_path
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.workspace import Workspace
from alignment_core.canonical import digest_of
from alignment_core.errors import EnvironmentFault, StoreError, UserError
from alignment_core.home import align_home

FORMAT_VERSION = 1


def open_store(uri: str | Path | None = None, writes: bool = True) -> Store:
    """The store at a folder path, or at a ``file://``, ``s3://bucket/prefix`` or ``hf://organisation/name`` URI.

    None: the one that ``$ALIGN_STORE`` names, or ``$ALIGN_HOME/store``.

    It is created when it is missing, and a write shows that it can be used. Without ``writes`` nothing is written, so that
    one may look at a store on a full disk, and free room there: a missing one is empty.

    Raises UserError for a path that is not a store or of an unsupported kind, EnvironmentFault when it
    cannot hold a store.
    """
    if uri == "":
        raise UserError("the store has an empty name: name a folder, or leave the name out")
    uri = uri or os.environ.get("ALIGN_STORE") or align_home() / "store"
    scheme, separator, _ = str(uri).partition("://")
    if separator and scheme not in _OPENERS:
        raise UserError(
            f"{uri}: there are no {scheme}:// stores; name a folder, or a URI that begins with "
            f"{', '.join(f'{known}://' for known in sorted(_OPENERS))}"
        )
    backend, workspace = _OPENERS[scheme if separator else "file"](uri)
    check_backend(backend, writes)
    return Store(backend, workspace)


def _open_folder(uri: str | Path) -> tuple[Backend, Workspace]:
    root = _folder(uri)
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file: a store is a folder")
    backend = FolderBackend(root)
    return backend, Workspace(backend.root)


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


def _workspace_of(backend: Backend) -> Workspace:
    """Where this machine keeps what belongs to a store that is not on its file system."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", backend.uri).strip("-")
    return Workspace(align_home() / "stores" / f"{readable[:80]}-{digest_of(backend.uri)[:8]}")


_OPENERS: dict[str, Callable[[str | Path], tuple[Backend, Workspace]]] = {
    "file": _open_folder,
    "hf": _open_hub,
    "s3": _open_s3,
}


def check_backend(backend: Backend, writes: bool = True) -> None:
    """Refuse a place that holds something else, a store of another format, or that ignores conditional writes."""
    new = backend.stat(FORMAT) is None
    if not new:
        _check_format(backend)
    for found in backend.list("") if new else ():
        if not found.path.startswith(LAYOUT):
            raise UserError(
                f"{backend.uri} holds other files ({found.path}) and is not a store: choose an empty or new one"
            )
    if writes and (new or not backend.few_writes):
        _probe(backend)
    if writes and new:
        backend.put(FORMAT, json.dumps({"format": FORMAT_VERSION}).encode())
        _check_format(backend)


def _check_format(backend: Backend) -> None:
    try:
        version = json.loads(backend.read(FORMAT))["format"]
    except (ValueError, KeyError, TypeError):
        raise StoreError(f'{FORMAT} in {backend.uri} is damaged: it should say {{"format": 1}}') from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{backend.uri} has store format {version}, this version reads format {FORMAT_VERSION}: "
            "use the version that wrote it"
        )


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
