"""The artifact store: publish, fetch, find and tag immutable artifacts, whatever storage holds the bytes."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from alignment_core.artifacts import tags
from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.blobs import Content
from alignment_core.artifacts.cache import LARGE, Cache, warn_of_copy
from alignment_core.artifacts.checksummed import seal
from alignment_core.artifacts.folder import FolderBackend
from alignment_core.artifacts.index import Index, Summary
from alignment_core.artifacts.leases import Leases
from alignment_core.artifacts.manifest import FileEntry, Manifest, parse_manifest
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import (
    MANIFESTS,
    PRUNED,
    STAGES,
    TAGS,
    check_tag,
    manifest_path,
    pruned_path,
    stage_path,
    use_path,
)
from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.provenance import Provenance, ProvenanceDraft, parse_record
from alignment_core.artifacts.reference import PRUNABLE, Reference
from alignment_core.artifacts.tags import TagMove
from alignment_core.artifacts.workspace import Workspace, adopt_tree, files_below
from alignment_core.canonical import canonical_json
from alignment_core.errors import (
    MAKE_IT_AGAIN,
    Conflict,
    Corrupt,
    EnvironmentFault,
    NotFound,
    StoreError,
    UnknownName,
    UserError,
)

log = logging.getLogger(__name__)

_ATTEMPTS = 5  # of operations that lose only when another process does the same work at the same moment
_THREADS = 8
_LOOKS = 16  # that take a round trip each
_PREFIX = re.compile(r"(?:(?P<kind>[a-z][a-z0-9_-]*)@sha256:)?(?P<digest>[0-9a-f]{4,64})")


@dataclass(frozen=True)
class _Files:
    """A directory that is to be published, and what it was when it was read."""

    directory: Path
    before: dict[str, os.stat_result]
    manifest: Manifest

    @property
    def digests(self) -> set[str]:
        """Of the manifest and of all blobs."""
        return {self.manifest.digest, *(entry.sha256 for entry in self.manifest.files)}

    @classmethod
    def of(cls, directory: Path, kind: str) -> _Files:
        directory = Path(directory)
        with explained("read", directory):
            return cls(directory, files_below(directory), Manifest.of_directory(directory, kind))


class _Pruned(Exception):
    """The bytes of an artifact were dropped on purpose."""


class Store:
    """Artifacts, stage records and tags in one place, with a verified cache on this machine.

    ``open_store`` makes one. A Store may be pickled and used from several threads. What stages keep on this machine until
    they publish lies in its ``workspace``.
    """

    def __init__(self, backend: Backend, workspace: Workspace) -> None:
        self.backend = backend
        self.workspace = workspace
        self.content = Content(backend, workspace)
        self.leases = Leases(backend)
        self.cache = Cache(workspace, bounded=not self.holds_workspace)
        self.index = Index(backend)

    @property
    def uri(self) -> str:
        """What ``open_store`` accepts to open the same store, here or in another process."""
        return self.backend.uri

    @property
    def holds_workspace(self) -> bool:
        """Whether the workspace lies in the store itself: a folder, which all machines that use it have."""
        return str(self.workspace.root) == self.uri

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    # ---------------------------------------------------------------- artifacts

    def publish(self, directory: Path, kind: str, provenance: ProvenanceDraft | None = None) -> Reference:
        """Make ``directory`` an artifact: blobs first, manifest next. With ``provenance``, it is a stage's one output.

        Atomic: whatever kills the publisher, readers see all of the artifact or nothing. Publishing the same bytes
        again is a success and mends what was lost or corrupted since. The directory itself is left alone.

        Raises UserError for an unusable directory, EnvironmentFault for a full or forbidden disk.
        """
        if provenance is not None:
            return self.publish_outputs({kind: (directory, kind)}, provenance)[kind]
        files = _Files.of(directory, kind)
        with self.leases.publication(files.digests, lasting=True):
            return self._publish(files)

    def publish_outputs(
        self, outputs: Mapping[str, tuple[Path, str]], provenance: ProvenanceDraft
    ) -> dict[str, Reference]:
        """Make each output of a stage, a directory and a kind by name, an artifact, and write the stage's one record.

        The record comes last: whatever kills the publisher, the stage is finished with all of its outputs, or its
        key is unknown and the collector finds what was written. The first whole result of a key wins: its outputs are
        returned, so that everyone goes on with one result. The first name is the default output. See :meth:`publish`.
        """
        files = {name: _Files.of(directory, kind) for name, (directory, kind) in outputs.items()}
        digests = set[str]().union(*(one.digests for one in files.values()))
        with self.leases.publication(digests, lasting=False):
            references = {name: self._publish(one) for name, one in files.items()}
            fields = {name: getattr(provenance, name) for name in ProvenanceDraft.model_fields}
            made = self._put_record(Provenance(**fields, outputs=references))
        for one in files.values():
            self.cache.keep(one.manifest.digest, one.directory)
        return made

    def adopt(self, manifest: Manifest, pruned: bool = False) -> None:
        """Make an artifact of blobs that are here, or tell of a ``pruned`` one whose bytes are not. For who publishes."""
        mark = pruned_path(manifest.digest)
        if pruned:
            self.backend.put(mark, b"pruned")  # first: nobody shall take it for whole
        self._put_manifest(manifest)
        if not pruned:
            for entry in manifest.files:
                if not self.content.is_intact(entry):
                    raise NotFound(f"{self.uri} has lost blob {entry.sha256} meanwhile: do it again")
            if manifest.kind in PRUNABLE:
                self._note_use(manifest.reference)
            self.backend.delete(mark)

    def adopt_record(self, record: Provenance) -> None:
        """Know a stage's record of another store; one that is here and whole stays."""
        self._put_record(record)

    def fetch(self, reference: Reference, until: ExitStack | None = None) -> Path:
        """A read-only directory with the artifact's files, every byte verified. It stays until that is closed; without it,
        until room is needed for other artifacts, or the collector finds that nothing refers to it any more.

        Bytes that this Store object has verified before are recognised by inode, size and time. Raises NotFound or
        Corrupt, naming the blob and the file.
        """
        with ExitStack() as meanwhile:
            self.cache.hold(reference.digest, until or meanwhile)
            return self._fetch(reference)

    def _fetch(self, reference: Reference) -> Path:
        manifest = self.manifest(reference)
        final = self.cache.folder(reference.digest)
        for _ in range(_ATTEMPTS):
            if final.is_dir():
                if self._cached(manifest, final):
                    return final
                self.workspace.discard(final)
            try:
                self._materialise(manifest, final)
            except NotFound as error:
                if not self.is_pruned(reference):
                    raise
                raise NotFound(f"the bytes of {reference.short} were pruned; {MAKE_IT_AGAIN}") from error
        raise StoreError(f"{final} changed while it was read: is something else writing to the cache?")

    def manifest(self, reference: Reference) -> Manifest:
        """The files of an artifact. Raises NotFound or Corrupt."""
        manifest = self.manifest_at(reference.digest)
        if manifest.kind != reference.kind:
            raise NotFound(f"{self.uri} has no {reference.short}: that digest is a {manifest.kind}")
        return manifest

    def artifacts(self) -> Iterator[Manifest]:
        """Every artifact of the store; ``.reference`` is its name. Corrupt manifests are logged and left out."""
        with self.index.view(MANIFESTS) as view:
            yield from view.manifests()

    def summaries(self) -> list[Summary]:
        """Every artifact in short, with what made it."""
        with self.index.view(MANIFESTS, STAGES) as view:
            return view.summaries({Path(mark.path).name for mark in self.backend.list(PRUNED)})

    def verify(self, reference: Reference) -> list[str]:
        """Read every byte of an artifact in the store (not the cache) and list what is wrong; empty means intact.

        What was pruned is as it should be, too: ``is_pruned`` tells the two apart.
        """
        try:
            manifest = self.manifest(reference)
        except (Corrupt, NotFound) as error:
            return [str(error)]
        if self.is_pruned(reference):
            return []
        problems = []
        for entry in manifest.files:
            try:
                self.content.verify(reference.short, entry)
            except (Corrupt, NotFound) as error:
                problems.append(str(error))
        return problems

    def is_pruned(self, reference: Reference) -> bool:
        """Whether the bytes of an artifact were dropped on purpose (:meth:`prune`), and not published again since."""
        return self.backend.stat(pruned_path(reference.digest)) is not None

    def resolve(self, text: str) -> Reference:
        """The existing artifact that ``text`` means: a reference, a digest prefix of 4 or more digits, or a tag.

        A tag wins over a digest prefix that is spelled the same. Raises UnknownName, or UserError when ``text``
        is ambiguous.
        """
        if "@" not in text and (tagged := self._tag_if_name(text)):
            return tagged
        match = _PREFIX.fullmatch(text)
        if match is None:
            known = sorted(self.tags())
            near = difflib.get_close_matches(text, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(known) or 'none yet'})"
            raise UnknownName(
                f"{text!r} matches nothing in {self.uri}: expected kind@sha256:<digest>, the first 4 or more digits of "
                f"a digest, or a tag{hint}"
            )
        prefix, kind = match["digest"], match["kind"]
        found = [
            manifest.reference
            for stored in self.backend.list(f"{MANIFESTS}sha256/{prefix[:2]}/")
            if Path(stored.path).stem.startswith(prefix)
            for manifest in [self.manifest_at(Path(stored.path).stem)]
            if kind in (None, manifest.kind)
        ]
        if not found:
            raise UnknownName(f"{self.uri} has no artifact {text!r}; `align artifacts ls` lists what there is")
        if len(found) > 1:
            raise UserError(f"{text!r} is ambiguous, add digits: " + ", ".join(map(str, sorted(found))))
        return found[0]

    # ---------------------------------------------------------------- stage records

    def find(self, key: str, needs: Collection[str] = (), use: bool = True) -> Provenance | None:
        """The record of a finished stage, when its outputs are still whole; otherwise None, and the log says why.

        Outputs that retention may drop count only where they are the default output or among the ``needs``. To find
        them so is to ``use`` them: their days under a retention policy count from now. Who merely looks does not.
        """
        path = stage_path(key)
        try:
            record = self.record_at(path)
            with ThreadPoolExecutor(_LOOKS) as pool:
                self._check_whole(record, needs, use, pool)
        except _Pruned as error:
            log.info("the stage with key %s has to run again: %s", key[:12], error)
            return None
        except (Corrupt, NotFound) as error:
            if self.backend.stat(path) is not None:
                log.warning("the stage with key %s has to run again: %s", key[:12], error)
            return None
        return record

    def _check_whole(self, record: Provenance, needs: Collection[str], use: bool, pool: ThreadPoolExecutor) -> None:
        """Raise _Pruned, Corrupt or NotFound where an output that counts is not whole. Whatever can be asked at once, is."""
        outputs = enumerate(record.outputs.items())
        counted = [one for place, (name, one) in outputs if place == 0 or name in needs or one.kind not in PRUNABLE]
        prunable = [one for one in counted if one.kind in PRUNABLE]
        used = pool.map(self._note_use, prunable if use else ())
        manifests = pool.map(self.manifest, counted)
        list(used)  # before the look at the marks, see retention
        for reference, pruned in zip(prunable, pool.map(self.is_pruned, prunable), strict=True):
            if pruned:
                raise _Pruned(f"{reference.short} was pruned")
        files = [(reference, entry) for reference, one in zip(counted, manifests, strict=True) for entry in one.files]
        intact = pool.map(lambda file: self.content.is_intact(file[1]), files)
        for (reference, entry), whole in zip(files, intact, strict=True):
            if not whole:
                raise Corrupt(f"blob {entry.sha256} of {entry.path} in {reference.short} is missing or damaged")

    def recorded(self, keys: Collection[str]) -> dict[str, Provenance]:
        """The records of finished stages by their keys, as far as there are any, whether or not the outputs are whole."""
        with self.index.view(STAGES) as view:
            return {record.key: record for record in view.recorded(keys)}

    def records(self, *stages: str) -> Iterator[Provenance]:
        """Every record, or those of some stages, in order of the keys. Unreadable ones are logged and left out."""
        with self.index.view(STAGES) as view:
            yield from view.records(*stages)

    def provenance(self, reference: Reference) -> list[Provenance]:
        """Who made an artifact: one record, none for an import, several when stages made the same bytes."""
        with self.index.view(STAGES) as view:
            return view.makers(reference)

    # ---------------------------------------------------------------- tags

    def tag(self, name: str) -> Reference | None:
        """The artifact that a tag names; None when there is no such tag."""
        latest = tags.last(self.backend, name)
        return latest.to if latest else None

    def move_tag(self, name: str, to: Reference, expected: Reference | None, reason: str) -> TagMove:
        """Move a tag from ``expected`` (None: the tag is new) to ``to``; one of several writers wins.

        Raises Conflict when the tag names something else by now, NotFound when ``to`` is not in the store.
        """
        self.manifest(to)
        return tags.move(self.backend, name, to, expected, reason)

    def tag_history(self, name: str) -> list[TagMove]:
        """The moves of a tag, oldest first."""
        with self.index.view(f"{TAGS}{check_tag(name)}/") as view:
            return [move for move in view.moves() if move.name == name]

    def tags(self) -> dict[str, Reference]:
        """Every tag and the artifact that it names."""
        with self.index.view(TAGS) as view:
            return {move.name: move.to for move in view.moves()}

    # ---------------------------------------------------------------- inside

    def _publish(self, files: _Files) -> Reference:
        manifest = files.manifest

        def put_again(entry: FileEntry) -> None:
            """If it was found damaged since, or taken by a collector that was stopped for minutes."""
            if not self.content.is_intact(entry):
                self.content.put_files([entry], files.directory, files.before)

        new = self.content.put_files(manifest.files, files.directory, files.before)
        self._put_manifest(manifest)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(put_again, (entry for entry in new if not new[entry])))
        if manifest.kind in PRUNABLE:
            self._note_use(manifest.reference)
        self.backend.delete(pruned_path(manifest.digest))  # last: whoever sees no mark finds all of the blobs
        return manifest.reference

    def _put_manifest(self, manifest: Manifest) -> None:
        path, data = manifest_path(manifest.digest), canonical_json(manifest)
        for _ in range(_ATTEMPTS):
            if self.backend.put(path, data):
                return
            existing = self.backend.stat(path)
            with suppress(NotFound):  # deleted since the look
                if existing and (self.backend.read(path) == data or self.backend.put(path, data, existing.version)):
                    return
        raise StoreError(f"{path} in {self.uri} changes faster than it can be written")

    def _put_record(self, record: Provenance) -> dict[str, Reference]:
        path, data = stage_path(record.key), seal(record)
        for _ in range(_ATTEMPTS):
            if self.backend.put(path, data):
                return record.outputs
            existing = self.backend.stat(path)
            first = self.find(record.key, needs=record.outputs)
            if first is not None and first.outputs.keys() == record.outputs.keys():
                for name, reference in record.outputs.items():
                    if first.outputs[name] != reference:
                        log.warning(
                            "stage %s (key %s) already has the result %s, which is kept; %s is left to the garbage collector",
                            record.stage,
                            record.key[:12],
                            first.outputs[name].short,
                            reference.short,
                        )
                return first.outputs
            if existing is not None and self.backend.put(path, data, replaces=existing.version):
                return record.outputs
        raise Conflict(f"the record of stage key {record.key} changes faster than it can be written")

    def _note_use(self, reference: Reference) -> None:
        """Let the days count from now that a retention policy gives to what may be pruned."""
        path = use_path(reference.digest)
        for _ in range(_ATTEMPTS):  # who loses to others that note the same has been noted by them
            existing = self.backend.stat(path)
            data = uuid.uuid4().hex.encode()  # other bytes, so that it is another version
            try:
                if self.backend.put(path, data, replaces=existing.version if existing else None):
                    return
            except EnvironmentFault as error:  # one may look at a store that is full, or somebody else's
                log.debug("%s", error)
                return

    def manifest_at(self, digest: str) -> Manifest:
        path = manifest_path(digest)
        try:
            data = self.backend.read(path)
        except NotFound as error:
            raise NotFound(f"{self.uri} has no artifact sha256:{digest}") from error
        return parse_manifest(self.uri, path, data)

    def record_at(self, path: str) -> Provenance:
        return parse_record(self.uri, path, self.backend.read(path))

    def _materialise(self, manifest: Manifest, final: Path) -> None:
        """Build the verified directory under a temporary name and move it into place in one step."""
        self.cache.make_room(manifest.size)
        with self.workspace.scratch() as scratch:
            fresh = scratch / "artifact"
            with explained("write", fresh):
                make_like_parent(self.workspace.cache)
                for entry in manifest.files:
                    (fresh / entry.path).parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(lambda e: self.content.get(manifest.reference.short, e, fresh / e.path), manifest.files))
            adopt_tree(fresh, final)
        if isinstance(self.backend, FolderBackend) and self.holds_workspace and manifest.size >= LARGE:
            warn_of_copy(self.backend, manifest)

    def _cached(self, manifest: Manifest, directory: Path) -> bool:
        """Whether the cached directory holds exactly the manifest's files; renews its time for the collector."""
        if set(files_below(directory)) != {entry.path for entry in manifest.files}:
            return False
        with ThreadPoolExecutor(_THREADS) as pool:
            problems = list(pool.map(lambda e: self.content.problem(e, directory / e.path), manifest.files))
        if any(problems):
            return False
        self._copy_writable_links(manifest)
        with suppress(OSError):  # a store that this user may only read has a collector of its own
            os.utime(directory)
        return True

    def _copy_writable_links(self, manifest: Manifest) -> None:
        """Make copies of files in the cache through which this user could write into the store; on a full disk they stay."""
        links = self.cache.writable_links(manifest.digest)
        for entry in manifest.files:
            if entry.path in links:
                with suppress(OSError, EnvironmentFault), self.workspace.scratch() as scratch:
                    shutil.copyfile(self.cache.folder(manifest.digest) / entry.path, scratch / "file")
                    (scratch / "file").chmod(0o444)
                    if self.content.problem(entry, scratch / "file") is None:
                        self.cache.replace(manifest.digest, entry.path, scratch / "file")

    def _tag_if_name(self, text: str) -> Reference | None:
        try:
            return self.tag(text)
        except UserError:
            return None
