"""The stage records of a store: which stages have finished, with which outputs, and whether those are still whole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from alignment_core.artifacts.backend import Backend
from alignment_core.artifacts.blobs import Blobs
from alignment_core.artifacts.checksummed import seal
from alignment_core.artifacts.index import Index
from alignment_core.artifacts.manifest import read_manifest
from alignment_core.artifacts.paths import STAGES, stage_path
from alignment_core.artifacts.provenance import Provenance, parse_record
from alignment_core.artifacts.reference import PRUNABLE, Reference
from alignment_core.artifacts.uses import is_pruned, note_use
from alignment_core.errors import Conflict, Corrupt, NotFound

log = logging.getLogger(__name__)

_ATTEMPTS = 5  # a writer loses only to another writer of the same record
_THREADS = 16  # requests at once; each costs a round trip to a server


class _Pruned(Exception):
    """The bytes of an output were pruned on purpose."""


class Records:
    """One record for each finished stage, by the stage's key."""

    def __init__(self, backend: Backend, blobs: Blobs, index: Index) -> None:
        self.backend = backend
        self.blobs = blobs
        self.index = index

    def find(self, key: str, needs: Collection[str] = (), use: bool = True) -> Provenance | None:
        """The record of a finished stage whose outputs are still whole; otherwise None, and the log says why.

        Prunable outputs count only if they are the default output or among the ``needs``. With ``use``, this counts as a
        use of them: a retention policy keeps them for its number of days from now.
        """
        path = stage_path(key)
        try:
            record = self.read(path)
            with ThreadPoolExecutor(_THREADS) as pool:
                self._check_whole(record, needs, use, pool)
        except _Pruned as error:
            log.info("the stage with key %s has to run again: %s", key[:12], error)
            return None
        except (Corrupt, NotFound) as error:
            if self.backend.stat(path) is not None:
                log.warning("the stage with key %s has to run again: %s", key[:12], error)
            return None
        return record

    def by_key(self, keys: Collection[str]) -> dict[str, Provenance]:
        """The records that exist for these keys, whether or not their outputs are whole."""
        with self.index.view(STAGES) as view:
            return view.by_key(keys)

    def all(self, *stages: str) -> Iterator[Provenance]:
        """Every record, or those of some stages, in order of the keys. Unreadable ones are logged and left out."""
        with self.index.view(STAGES) as view:
            yield from view.records(*stages)

    def makers(self, reference: Reference) -> list[Provenance]:
        """The records with an artifact among their outputs: none for an import, several when stages made the same bytes."""
        with self.index.view(STAGES) as view:
            return view.makers(reference)

    def read(self, path: str) -> Provenance:
        """The record at a path of the store. Raises NotFound or Corrupt."""
        return parse_record(self.backend.uri, path, self.backend.read(path))

    def put(self, record: Provenance) -> dict[str, Reference]:
        """Write a record, unless the key has one whose outputs are whole; returns the outputs of the record that stays."""
        path, data = stage_path(record.key), seal(record)
        for _ in range(_ATTEMPTS):
            if self.backend.put(path, data):
                return record.outputs
            existing = self.backend.stat(path)
            first = self.find(record.key, needs=record.outputs)
            if first is not None and first.outputs.keys() == record.outputs.keys():
                _warn_of_other_results(first, record)
                return first.outputs
            if existing is not None and self.backend.put(path, data, replaces=existing.version):
                return record.outputs
        raise Conflict(f"the record of stage key {record.key} changes faster than it can be written")

    def _check_whole(self, record: Provenance, needs: Collection[str], use: bool, pool: ThreadPoolExecutor) -> None:
        """Raise _Pruned, Corrupt or NotFound where an output that counts is not whole."""
        outputs = enumerate(record.outputs.items())
        counted = [
            output for place, (name, output) in outputs if place == 0 or name in needs or output.kind not in PRUNABLE
        ]
        prunable = [output for output in counted if output.kind in PRUNABLE]
        used = pool.map(lambda output: note_use(self.backend, output), prunable if use else ())
        manifests = pool.map(lambda output: read_manifest(self.backend, output), counted)
        list(used)  # a use is noted before the marks are read; the pruner works in the opposite order (retention.py)
        pruned = pool.map(lambda output: is_pruned(self.backend, output), prunable)
        for reference, is_gone in zip(prunable, pruned, strict=True):
            if is_gone:
                raise _Pruned(f"{reference.short} was pruned")
        files = [
            (reference, entry) for reference, output in zip(counted, manifests, strict=True) for entry in output.files
        ]
        intact = pool.map(lambda file: self.blobs.is_intact(file[1]), files)
        for (reference, entry), whole in zip(files, intact, strict=True):
            if not whole:
                raise Corrupt(f"blob {entry.sha256} of {entry.path} in {reference.short} is missing or damaged")


def _warn_of_other_results(first: Provenance, second: Provenance) -> None:
    for name, reference in second.outputs.items():
        if first.outputs[name] != reference:
            log.warning(
                "stage %s (key %s) already has the result %s, which is kept; %s is left to the garbage collector",
                second.stage,
                second.key[:12],
                first.outputs[name].short,
                reference.short,
            )
