"""Provenance for others: an in-toto statement (v1) with the predicate SLSA provenance (v1), made from a stage's record.

https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1. Like the record, it is a claim of this
system about itself: it is as trustworthy as its signature or its sender.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alignment_core.artifacts import Manifest, Provenance
from alignment_core.attestation.ancestry import Ancestor, Ancestry
from alignment_core.attestation.names import commit_in, hub_uri, package_url, sha256_of, utc

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:alignment:stage:v1"
"""Type of the definition; docs/trust.md explains ``externalParameters`` and ``internalParameters``."""
BUILDER = "urn:alignment:run-host:v1"


def statement(manifest: Manifest, ancestry: Ancestry, record: Provenance) -> dict[str, Any]:
    """The statement about an artifact that the stage of ``record`` made. Equal records give equal statements."""
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": str(manifest.reference), "digest": {"sha256": manifest.digest}},
            *({"name": entry.path, "digest": {"sha256": entry.sha256}} for entry in manifest.files),
        ],
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": _definition(ancestry, record), "runDetails": _details(record)},
    }


def _definition(ancestry: Ancestry, record: Provenance) -> dict[str, Any]:
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "stage": record.stage,
            "label": record.label,
            "config": record.config,
            "seed": record.seed,
            "inputs": {role: str(reference) for role, reference in record.inputs.items()},
        },
        "internalParameters": {
            "key": record.key,
            "keyParts": record.key_parts,
            "codeVersion": record.code_version,
            "acceptedVersions": record.accepted,
        },
        "resolvedDependencies": [*_artifacts(ancestry), *_sources(ancestry), *_packages(record)],
    }


def _artifacts(ancestry: Ancestry) -> Iterator[dict[str, Any]]:
    for ancestor in ancestry.earlier:
        yield {
            "name": ancestor.path,
            "uri": f"urn:alignment:{ancestor.reference}",
            "digest": {"sha256": ancestor.reference.digest},
            "annotations": {"kind": ancestor.reference.kind, **_maker(ancestor)},
        }


def _maker(ancestor: Ancestor) -> dict[str, str]:
    maker = ancestor.record
    return {"stage": maker.stage, "label": maker.label, "key": maker.key} if maker else {}


def _sources(ancestry: Ancestry) -> Iterator[dict[str, Any]]:
    """Files and Hub repositories, each once for each content that it had."""
    seen = set()
    for ancestor in ancestry.all:
        for source in ancestor.sources:
            identity = (source.path, source.sha256, source.commit, source.version)
            if identity in seen or not any(identity[1:]):
                continue
            seen.add(identity)
            if source.commit:
                uri = hub_uri(source.path, source.commit, is_data=ancestor.reads_data)
                yield {"name": source.path, "uri": uri, "digest": {"gitCommit": source.commit}}
            elif source.version:
                yield _at_address(source.path, source.version)
            else:
                yield {"name": source.path, "digest": {"sha256": source.sha256}}


def _at_address(address: str, version: str) -> dict[str, Any]:
    """A file at an address: with its digest if that is known, otherwise with the server's version."""
    if digest := sha256_of(version):
        return {"name": address, "uri": address, "digest": {"sha256": digest}}
    commit = commit_in(address)
    digests = {"digest": {"gitCommit": commit}} if commit else {}
    return {"name": address, "uri": address, **digests, "annotations": {"version": version}}


def _packages(record: Provenance) -> Iterator[dict[str, Any]]:
    for name, version in sorted(record.packages.items()):
        yield {"name": name, "uri": package_url(name, version)}


def _details(record: Provenance) -> dict[str, Any]:
    times = {"startedOn": utc(record.started_at), "finishedOn": utc(record.finished_at)}
    return {
        "builder": {"id": BUILDER, "version": {"alignment": record.code_version}},
        "metadata": {
            "invocationId": record.run_ids.get("prefect", record.key),
            **{name: time for name, time in times.items() if time},
        },
        # Fields of our own; the predicate wants the vendor's name before them.
        "alignment_runIds": record.run_ids,
        "alignment_hardware": record.hardware,
        "alignment_cost": record.cost,
        "alignment_metrics": record.metrics,
    }
