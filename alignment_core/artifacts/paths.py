"""The paths of a store's objects, and the rules for paths, keys and tag names."""

from __future__ import annotations

import re

from alignment_core.artifacts.reference import DIGEST
from alignment_core.errors import StoreError, UserError

FORMAT = "format.json"
BLOBS = "blobs/"
MANIFESTS = "manifests/"
STAGES = "stages/"
TAGS = "tags/"
SUSPECTS = "suspects/"  # blobs that a reader found corrupt: find() counts them as missing, publish() replaces them
PRUNED = "pruned/"  # artifacts whose bytes retention deleted; their manifests and records stay
PROGRESS = "progress/"
SNAPSHOTS = "snapshots/"  # lists of the progress files of unfinished stages: artifacts/stored_progress.py
CACHE = "cache/"
HOLDS = "holds/"  # locks on cached artifacts in use: artifacts/cache.py
TEMPORARY = "tmp/"
LEASES = "leases/"  # of publishers, the collector, running stages and nights: artifacts/leases.py
PUBLICATIONS = f"{LEASES}publications/"
RUNNING = f"{LEASES}stages/"
NIGHTS = f"{LEASES}nights/"
COLLECTOR = f"{LEASES}collector.json"
USES = "uses/"  # times of the last use of prunable artifacts
ATTACHMENTS = "attachments/"  # files beside an artifact, such as its signature: artifacts/attachments.py
LOCK = "lock"  # of the folder backend: held while an object of a known version is replaced or deleted
LAYOUT = (
    FORMAT,
    BLOBS,
    MANIFESTS,
    STAGES,
    TAGS,
    SUSPECTS,
    PRUNED,
    PROGRESS,
    SNAPSHOTS,
    CACHE,
    HOLDS,
    TEMPORARY,
    LEASES,
    USES,
    ATTACHMENTS,
    LOCK,
)

_UNFIT = re.compile(r"[\\\x00-\x1f\x7f]")
_TAG_PART = re.compile(r"[a-z0-9][a-z0-9._-]*")
_ATTACHMENT = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MOVE = re.compile(r"[0-9]{8}\.json")


def check_path(path: str) -> str:
    """``path``, if it is a plain relative POSIX path that cannot leave its root; ValueError otherwise."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is not a plain relative path: no '..', '.', empty part or leading '/'")
    if _UNFIT.search(path):
        raise ValueError(f"{path!r} holds a backslash or a control character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path!r} is not valid UTF-8") from None
    return path


def inside(store: str, path: str) -> str:
    """``path``, if it may name an object of the store with this URI; StoreError otherwise."""
    try:
        return check_path(path)
    except ValueError as error:
        raise StoreError(f"the store at {store} refuses the path: {error}") from error


def check_key(key: str) -> str:
    """``key``, if it is a stage key; UserError otherwise."""
    if not DIGEST.fullmatch(key):
        raise UserError(f"{key!r} is not a stage key: a key is 64 lower-case hex digits")
    return key


def check_tag(name: str) -> str:
    """``name``, if it is a tag name; UserError otherwise."""
    parts = name.split("/")
    if not all(_TAG_PART.fullmatch(part) and not _MOVE.fullmatch(part) for part in parts):
        raise UserError(
            f"{name!r} is not a tag name: use lower-case words of letters, digits, '.', '_' and '-' "
            "joined by '/', such as policy/production"
        )
    return name


def blob_path(digest: str) -> str:
    return f"{BLOBS}sha256/{digest[:2]}/{digest}"


def digest_of_blob(path: str) -> str | None:
    """The SHA-256 of the bytes at a path, if it is a blob's."""
    name = path.rpartition("/")[2]
    return name if DIGEST.fullmatch(name) and path == blob_path(name) else None


def manifest_path(digest: str) -> str:
    return f"{MANIFESTS}sha256/{digest[:2]}/{digest}.json"


def suspect_path(digest: str) -> str:
    return f"{SUSPECTS}{digest}"


def pruned_path(digest: str) -> str:
    return f"{PRUNED}{digest}"


def use_path(digest: str) -> str:
    return f"{USES}{digest}"


def attachments_path(digest: str) -> str:
    return f"{ATTACHMENTS}{digest}/"


def attachment_path(digest: str, name: str) -> str:
    """Raises StoreError for a name that is not a plain lower-case file name."""
    if not _ATTACHMENT.fullmatch(name):
        raise StoreError(f"{name!r} is no name of an attachment: use letters a to z, digits, '.', '_' and '-'")
    return f"{attachments_path(digest)}{name}"


def running_path(key: str) -> str:
    """The lease of the process that runs a stage."""
    return f"{RUNNING}{check_key(key)}.json"


def night_path(digest: str) -> str:
    """The lease of the night that processes a batch of rows."""
    return f"{NIGHTS}{digest}.json"


def snapshot_path(key: str) -> str:
    return f"{SNAPSHOTS}{check_key(key)}.json"


def stage_path(key: str) -> str:
    return f"{STAGES}{check_key(key)}.json"


def tag_path(name: str, number: int) -> str:
    return f"{TAGS}{check_tag(name)}/{number:08d}.json"


def parse_tag_path(path: str) -> tuple[str, int] | None:
    """(tag name, move number) of an object below ``tags/``; None for anything that is not a move."""
    name, _, file = path.removeprefix(TAGS).rpartition("/")
    return (name, int(file.removesuffix(".json"))) if name and _MOVE.fullmatch(file) else None
