"""Small files beside an artifact, such as its signature: not part of its content or digest, and deleted with it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from alignment_core.artifacts.backend import overwrite
from alignment_core.artifacts.paths import attachment_path, attachments_path
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.store import Store
from alignment_core.errors import NotFound


def attach(store: Store, reference: Reference, files: Mapping[str, bytes]) -> None:
    """Put files beside an artifact, by name; an existing file of that name is replaced.

    Raises NotFound if there is no such artifact, StoreError for an invalid name.
    """
    store.manifest(reference)
    paths = [attachment_path(reference.digest, name) for name in files]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda path, data: overwrite(store.backend, path, data), paths, files.values()))


def attachments(store: Store, reference: Reference) -> dict[str, bytes]:
    """The files beside an artifact, by name."""
    prefix = attachments_path(reference.digest)
    return {stored.path.removeprefix(prefix): store.backend.read(stored.path) for stored in store.backend.list(prefix)}


def attachment(store: Store, reference: Reference, name: str) -> bytes | None:
    """One of the files beside an artifact; None if there is none of this name."""
    try:
        return store.backend.read(attachment_path(reference.digest, name))
    except NotFound:
        return None
