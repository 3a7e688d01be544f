"""Copying artifacts from one store to another, with their stage records and, optionally, all their ancestors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.attachments import attach, attachments
from alignment_core.artifacts.manifest import FileEntry, Manifest
from alignment_core.artifacts.provenance import Provenance
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.store import Store
from alignment_core.errors import MAKE_IT_AGAIN, Corrupt, NotFound, UserError

_THREADS = 4  # files in transfer, each of which has a copy on this machine meanwhile


class Copied(BaseModel):
    """The result of a copy."""

    model_config = ConfigDict(frozen=True)

    artifacts: tuple[Reference, ...] = Field(description="the copied artifacts, the requested one first")
    records: int = Field(description="stage records that were put")
    sent: int = Field(description="files that were sent")
    sent_bytes: int = Field(description="bytes of these files")
    kept: int = Field(description="files that were not sent because the target has them")


class Plan(BaseModel):
    """The parts of a copy."""

    model_config = ConfigDict(frozen=True)

    manifests: tuple[Manifest, ...]
    """The artifacts, the requested one first."""
    pruned: frozenset[Reference]
    """Those of them whose bytes retention deleted: they are recorded as pruned in the target."""
    records: tuple[Provenance, ...]
    missing: tuple[tuple[Reference, FileEntry], ...]
    """The files that the target does not have, each content once, with an artifact that they are of."""

    @property
    def size(self) -> int:
        """Bytes to send."""
        return sum(entry.size for _, entry in self.missing)


def plan(source: Store, target: Store, reference: Reference, ancestors: bool) -> Plan:
    """Plan the copy of an artifact with its descriptions, and with ``ancestors`` of all its ancestors, without the parts that
    the target has.

    The master weights of a policy come with it, unless their bytes were pruned, so that it can be trained further.
    Raises NotFound if the source does not have it, or its bytes were pruned, UserError if both are the same store.
    """
    if source.uri == target.uri:
        raise UserError(f"{source.uri} is both the source and the target: name two stores")
    if source.is_pruned(reference):
        raise NotFound(f"the bytes of {reference.short} were pruned; {MAKE_IT_AGAIN}")
    manifests = {reference: source.manifest(reference)}
    records: dict[str, Provenance] = {}
    waiting = [reference]
    while waiting:
        for record in source.records.makers(waiting.pop()):
            records[record.key] = record
            for description in record.described_by.values():
                # A collector of an earlier version does not know it, and nothing depends on it.
                with contextlib.suppress(NotFound, Corrupt):
                    manifest = source.manifest(description)
                    if all(map(source.blobs.is_intact, manifest.files)):
                        manifests.setdefault(description, manifest)
            for ancestor in record.inputs.values() if ancestors else ():
                if ancestor not in manifests:
                    with contextlib.suppress(NotFound):  # it was copied to the source without its ancestors
                        manifests[ancestor] = source.manifest(ancestor)
                        waiting.append(ancestor)
    masters = source.masters_of(manifests[reference])
    if masters is not None and not source.is_pruned(masters):
        with contextlib.suppress(NotFound):  # the policy was copied to the source without them
            manifests[masters] = source.manifest(masters)
            records |= {record.key: record for record in source.records.makers(masters)}
    gone = frozenset(ancestor for ancestor in manifests if ancestor != reference and source.is_pruned(ancestor))
    files = {
        entry.sha256: (ancestor, entry)
        for ancestor, manifest in manifests.items()
        if ancestor not in gone
        for entry in manifest.files
    }
    with ThreadPoolExecutor(4 * _THREADS) as pool:
        present = list(pool.map(lambda file: target.blobs.is_intact(file[1]), files.values()))
    missing = tuple(file for file, intact in zip(files.values(), present, strict=True) if not intact)
    return Plan(manifests=tuple(manifests.values()), pruned=gone, records=tuple(records.values()), missing=missing)


def plan_bytes(source: Store, target: Store, reference: Reference) -> Plan:
    """Plan the copy of an artifact alone, without the records of the stages that made it. Raises NotFound."""
    manifest = source.manifest(reference)
    missing = tuple((reference, entry) for entry in manifest.files if not target.blobs.is_intact(entry))
    return Plan(manifests=(manifest,), pruned=frozenset(), records=(), missing=missing)


def copy(source: Store, target: Store, plan: Plan, on_arrival: Callable[[FileEntry], None] = lambda _: None) -> Copied:
    """Carry out a plan; ``on_arrival`` is called with each file that has arrived. The next copy resumes a killed one.

    Blobs come first, then manifests, then records, so that no reader of the target sees a part. Attachments are copied, too,
    unless the target has one of the same name. The other outputs of a stage whose record is copied are marked as pruned in
    the target, unless it has them: the stage would have to run again for them.
    """
    manifests = [*plan.manifests, *_other_outputs(source, target, plan)]
    digests = {manifest.digest for manifest in manifests}
    digests |= {entry.sha256 for manifest in plan.manifests for entry in manifest.files}
    gone = plan.pruned | {manifest.reference for manifest in manifests[len(plan.manifests) :]}

    def send(missing: tuple[Reference, FileEntry]) -> None:
        owner, entry = missing
        with source.workspace.scratch() as scratch:
            file = scratch / "file"
            source.blobs.get(owner.short, entry, file)
            target.blobs.put(entry, file, file.lstat())
        on_arrival(entry)

    with target.leases.publication(digests, lasting=not plan.records):
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(send, plan.missing))
        target.blobs.trust(entry for _, entry in plan.missing)
        for manifest in reversed(manifests):
            if manifest.reference not in gone:
                target.adopt(manifest)
            elif not _has(target, manifest.reference):
                target.adopt(manifest, pruned=True)
        for record in plan.records:
            target.records.put(record)
        for manifest in plan.manifests:
            existing = attachments(target, manifest.reference)
            own = attachments(source, manifest.reference)
            attach(target, manifest.reference, {name: data for name, data in own.items() if name not in existing})
    files = {
        entry.sha256 for manifest in plan.manifests if manifest.reference not in plan.pruned for entry in manifest.files
    }
    return Copied(
        artifacts=tuple(manifest.reference for manifest in plan.manifests),
        records=len(plan.records),
        sent=len(plan.missing),
        sent_bytes=plan.size,
        kept=len(files) - len(plan.missing),
    )


def _other_outputs(source: Store, target: Store, plan: Plan) -> Iterator[Manifest]:
    """Other outputs of the copied stages that are neither copied nor in the target."""
    copied = {manifest.reference for manifest in plan.manifests}
    for output in {output for record in plan.records for output in record.outputs.values()} - copied:
        if not _has(target, output):
            with contextlib.suppress(NotFound):
                yield source.manifest(output)


def _has(store: Store, reference: Reference) -> bool:
    try:
        store.manifest(reference)
    except NotFound:
        return False
    return True
