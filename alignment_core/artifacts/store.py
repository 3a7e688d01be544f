"""The artifact store: publish, fetch, find and tag immutable artifacts, whatever storage holds the bytes."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from alignment_core.artifacts.backend import Backend, overwrite
from alignment_core.artifacts.blobs import Blobs
from alignment_core.artifacts.cache import Cache
from alignment_core.artifacts.index import Index, Summary
from alignment_core.artifacts.leases import Leases
from alignment_core.artifacts.manifest import FileEntry, Manifest, manifest_at, read_manifest
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.paths import MANIFESTS, PRUNED, STAGES, manifest_path, pruned_path
from alignment_core.artifacts.provenance import Provenance, ProvenanceDraft
from alignment_core.artifacts.records import Records
from alignment_core.artifacts.reference import MASTERS, POINTER, PRUNABLE, Reference
from alignment_core.artifacts.tags import Tags
from alignment_core.artifacts.uses import is_pruned, note_use
from alignment_core.artifacts.workspace import Workspace, files_below
from alignment_core.canonical import canonical_json
from alignment_core.errors import MAKE_IT_AGAIN, Corrupt, NotFound, UnknownName, UserError

_THREADS = 8
_PREFIX = re.compile(r"(?:(?P<kind>[a-z][a-z0-9_-]*)@sha256:)?(?P<digest>[0-9a-f]{4,64})")


@dataclass(frozen=True)
class _Files:
    """A directory to publish, and the state of its files when they were read."""

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


class Store:
    """Artifacts in one place, with a verified cache on this machine; ``records`` are the stages that made them, ``tags`` name
    them.

    ``open_store`` makes one. A Store may be pickled and used from several threads. Files that stages keep on this machine
    until they publish lie in its ``workspace``.
    """

    def __init__(self, backend: Backend, workspace: Workspace, index: Index | None = None) -> None:
        self.backend = backend
        self.workspace = workspace
        self.blobs = Blobs(backend, workspace)
        self.leases = Leases(backend)
        self.cache = Cache(self.blobs, workspace, bounded=not self.holds_workspace)
        self.index = index or Index(backend)
        self.records = Records(backend, self.blobs, self.index)
        self.tags = Tags(backend, self.index)

    @property
    def uri(self) -> str:
        """What ``open_store`` accepts to open the same store, here or in another process."""
        return self.backend.uri

    @property
    def holds_workspace(self) -> bool:
        """Whether the workspace lies in the store itself: a folder, shared by all machines that use it."""
        return str(self.workspace.root) == self.uri

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def publish(self, directory: Path, kind: str, provenance: ProvenanceDraft | None = None) -> Reference:
        """Make ``directory`` an artifact: blobs first, manifest next. With ``provenance``, it is a stage's one output.

        Atomic: whatever kills the publisher, readers see all of the artifact or nothing. Publishing the same bytes
        again is a success and restores lost or corrupt blobs. The directory itself is left alone.

        Raises UserError for an unusable directory, EnvironmentFault for a full or forbidden disk.
        """
        if provenance is not None:
            return self.publish_outputs({kind: (directory, kind)}, provenance)[kind]
        files = _Files.of(directory, kind)
        with self.leases.publication(files.digests, lasting=True):
            return self._publish(files)

    def publish_outputs(
        self,
        outputs: Mapping[str, tuple[Path, str]],
        provenance: ProvenanceDraft,
        described_by: Mapping[str, tuple[Path, str]] = {},
    ) -> dict[str, Reference]:
        """Make each output of a stage, a directory and a kind by name, an artifact, and write the stage's one record, which
        also names the artifacts that it is ``described_by``.

        The record comes last: whatever kills the publisher, the stage is finished with all of its outputs, or its
        key is unknown and the collector deletes the leftovers. The first whole result of a key wins: its outputs are
        returned, so that all callers continue with one result. The first name is the default output. See :meth:`publish`.
        """
        files = {name: _Files.of(directory, kind) for name, (directory, kind) in outputs.items()}
        descriptions = {role: _Files.of(directory, kind) for role, (directory, kind) in described_by.items()}
        digests = set[str]().union(*(each.digests for each in (*files.values(), *descriptions.values())))
        with self.leases.publication(digests, lasting=False):
            references = {name: self._publish(output) for name, output in files.items()}
            with ThreadPoolExecutor(_THREADS) as pool:  # nearly all stages of a run have the same
                named = dict(zip(descriptions, pool.map(self._publish_new, descriptions.values()), strict=True))
            fields = {name: getattr(provenance, name) for name in ProvenanceDraft.model_fields}
            recorded = self.records.put(Provenance(**fields, outputs=references, described_by=named))
        for output in files.values():
            self.cache.keep(output.manifest.digest, output.directory)
        return recorded

    def adopt(self, manifest: Manifest, pruned: bool = False) -> None:
        """Make an artifact of blobs that are in the store, or record a ``pruned`` one without its bytes.

        The caller holds a publication lease. Raises NotFound when a blob is missing.
        """
        mark = pruned_path(manifest.digest)
        if pruned:
            self.backend.put(mark, b"pruned")  # before the manifest, so that no reader takes the artifact for whole
        overwrite(self.backend, manifest_path(manifest.digest), canonical_json(manifest))
        if not pruned:
            for entry in manifest.files:
                if not self.blobs.is_intact(entry):
                    raise NotFound(f"{self.uri} has lost blob {entry.sha256} meanwhile: do it again")
            if manifest.kind in PRUNABLE:
                note_use(self.backend, manifest.reference)
            self.backend.delete(mark)

    def fetch(self, reference: Reference, until: ExitStack | None = None) -> Path:
        """A read-only directory with the artifact's files, every byte verified.

        It stays until ``until`` is closed; without it, until space is needed for other artifacts or the collector finds it
        unreferenced. Bytes that this Store object has verified before are recognised by inode, size and time. Raises
        NotFound or Corrupt, naming the blob and the file.
        """
        with ExitStack() as meanwhile:
            self.cache.hold(reference.digest, until or meanwhile)
            manifest = self.manifest(reference)
            try:
                return self.cache.fetch(manifest)
            except NotFound as error:
                if not self.is_pruned(reference):
                    raise
                raise NotFound(f"the bytes of {reference.short} were pruned; {MAKE_IT_AGAIN}") from error

    def manifest(self, reference: Reference) -> Manifest:
        """The files of an artifact. Raises NotFound or Corrupt."""
        return read_manifest(self.backend, reference)

    def masters_of(self, policy: Manifest) -> Reference | None:
        """The fp32 master weights that a policy names, see :mod:`alignment_core.models.masters`; None if it names none. They
        need not be in this store. Raises NotFound or Corrupt if the file with their name is lost or damaged."""
        for entry in policy.files:
            if entry.path == POINTER:
                with suppress(ValueError, KeyError, TypeError, UserError):
                    return Reference.parse(str(json.loads(self.blobs.read(policy.reference.short, entry))[MASTERS]))
        return None

    def artifacts(self) -> Iterator[Manifest]:
        """Every artifact of the store; ``.reference`` is its name. Corrupt manifests are logged and left out."""
        with self.index.view(MANIFESTS) as view:
            yield from view.manifests()

    def summaries(self) -> list[Summary]:
        """Every artifact in short, with the stages that made it."""
        with self.index.view(MANIFESTS, STAGES) as view:
            return view.summaries(self.pruned())

    def verify(self, reference: Reference) -> list[str]:
        """Read every byte of an artifact in the store (not the cache) and list what is wrong; empty means intact.

        A pruned artifact has no problems either: ``is_pruned`` tells the two apart.
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
                self.blobs.verify(reference.short, entry)
            except (Corrupt, NotFound) as error:
                problems.append(str(error))
        return problems

    def pruned(self) -> frozenset[str]:
        """Digests of the artifacts whose bytes retention deleted."""
        return frozenset(Path(mark.path).name for mark in self.backend.list(PRUNED))

    def is_pruned(self, reference: Reference) -> bool:
        """Whether retention deleted the bytes of an artifact, and they were not published again since."""
        return is_pruned(self.backend, reference)

    def resolve(self, text: str) -> Reference:
        """The existing artifact that ``text`` means: a reference, a digest prefix of 4 or more digits, or a tag.

        A tag wins over a digest prefix that is spelled the same. Raises UnknownName, or UserError when ``text``
        is ambiguous.
        """
        if "@" not in text:
            with suppress(UserError):  # not a valid name of a tag
                if tagged := self.tags.get(text):
                    return tagged
        match = _PREFIX.fullmatch(text)
        if match is None:
            known = sorted(self.tags.all())
            near = difflib.get_close_matches(text, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(known) or 'none yet'})"
            raise UnknownName(
                f"{text!r} matches nothing in {self.uri}: expected kind@sha256:<digest>, the first 4 or more digits of "
                f"a digest, or a tag{hint}"
            )
        prefix, kind = match["digest"], match["kind"]
        matches = [
            manifest.reference
            for stored in self.backend.list(f"{MANIFESTS}sha256/{prefix[:2]}/")
            if Path(stored.path).stem.startswith(prefix)
            for manifest in [manifest_at(self.backend, Path(stored.path).stem)]
            if kind in (None, manifest.kind)
        ]
        if not matches:
            raise UnknownName(f"{self.uri} has no artifact {text!r}; `align artifacts ls` lists what there is")
        if len(matches) > 1:
            raise UserError(f"{text!r} is ambiguous, add digits: " + ", ".join(map(str, sorted(matches))))
        return matches[0]

    def _publish_new(self, files: _Files) -> Reference:
        is_there = self.backend.stat(manifest_path(files.manifest.digest)) is not None
        whole = is_there and all(map(self.blobs.is_intact, files.manifest.files))
        return files.manifest.reference if whole else self._publish(files)

    def _publish(self, files: _Files) -> Reference:
        manifest = files.manifest

        def put_again(entry: FileEntry) -> None:
            """Put a blob again that a reader found damaged since, or that a collector deleted after a pause of minutes."""
            if not self.blobs.is_intact(entry):
                self.blobs.put_files([entry], files.directory, files.before)

        new = self.blobs.put_files(manifest.files, files.directory, files.before)
        overwrite(self.backend, manifest_path(manifest.digest), canonical_json(manifest))
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(put_again, (entry for entry in new if not new[entry])))
        if manifest.kind in PRUNABLE:
            note_use(self.backend, manifest.reference)
        self.backend.delete(pruned_path(manifest.digest))  # last: a reader that sees no mark finds all of the blobs
        return manifest.reference
