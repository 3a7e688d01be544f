"""Marks of retention on artifacts whose bytes may be pruned: when they were last used, and that they were pruned."""

from __future__ import annotations

import logging
import uuid

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.paths import pruned_path, use_path
from alignment_core.artifacts.reference import Reference
from alignment_core.errors import EnvironmentFault

log = logging.getLogger(__name__)

_ATTEMPTS = 5


def is_pruned(backend: Backend, reference: Reference) -> bool:
    """Whether retention deleted the bytes of an artifact, and they were not published again since."""
    return backend.stat(pruned_path(reference.digest)) is not None


def note_use(backend: Backend, reference: Reference) -> None:
    """Note that an artifact is used now; a retention policy counts its days from here."""
    path = use_path(reference.digest)
    for _ in range(_ATTEMPTS):  # another writer that wins has noted a use at the same moment
        existing = backend.stat(path)
        data = uuid.uuid4().hex.encode()  # other bytes than before, so that the version changes
        try:
            if backend.put(path, data, replaces=existing.version if existing else None):
                return
        except EnvironmentFault as error:  # reading must work in a store that is full or read-only
            log.debug("%s", error)
            return
