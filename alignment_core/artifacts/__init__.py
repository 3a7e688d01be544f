"""The artifact store: immutable directories named by their content, with provenance and movable tags."""

from alignment_core.artifacts.backend import Backend, Object
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.gc import Garbage, GcReport, collect
from alignment_core.artifacts.index import Summary
from alignment_core.artifacts.manifest import FileEntry, Manifest
from alignment_core.artifacts.open import check_backend, open_store
from alignment_core.artifacts.provenance import Provenance, ProvenanceDraft
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.retention import prune
from alignment_core.artifacts.store import Store
from alignment_core.artifacts.tag_history import TagMove
from alignment_core.artifacts.workspace import Workspace

__all__ = [
    "Backend",
    "FileEntry",
    "FolderBackend",
    "Garbage",
    "GcReport",
    "Manifest",
    "Object",
    "Provenance",
    "ProvenanceDraft",
    "Reference",
    "Store",
    "Summary",
    "TagMove",
    "Workspace",
    "check_backend",
    "collect",
    "open_store",
    "prune",
]
