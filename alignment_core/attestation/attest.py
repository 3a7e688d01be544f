"""Attestations and signatures beside an artifact in the store, which a recipe's promotion may require."""

from __future__ import annotations

import json
from typing import Any

from alignment_core.artifacts import Manifest, Reference, Store
from alignment_core.artifacts.attachments import attach
from alignment_core.attestation.ancestry import ancestry_of
from alignment_core.attestation.bom import bill, config_of
from alignment_core.attestation.model_repo import has_token
from alignment_core.attestation.provenance import statement
from alignment_core.attestation.signing import private_key, sign
from alignment_core.credentials import Cutter
from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import PromotionConfig

PROVENANCE, BOM = "provenance.intoto.json", "bom.cdx.json"
"""Names of the files beside an artifact, and of those that `align artifacts attest` writes."""


def attestations(store: Store, reference: Reference) -> dict[str, bytes]:
    """The attestations by file name, without secrets, made from the records of the store as they are now.

    An imported artifact, which no stage made, has a bill of materials alone. Raises NotFound or Corrupt.
    """
    manifest, ancestry = store.manifest(reference), ancestry_of(store, reference)
    documents = {BOM: bill(manifest, ancestry, config_of(_file(store, manifest, "config.json")))}
    if record := ancestry.artifact.record:
        documents[PROVENANCE] = statement(manifest, ancestry, record)
    return {name: _json(Cutter().plain(content)) for name, content in documents.items()}


def attest(store: Store, reference: Reference) -> dict[str, bytes]:
    """Make the attestations, and put them beside the artifact."""
    documents = attestations(store, reference)
    attach(store, reference, documents)
    return documents


def check_ready(section: PromotionConfig) -> None:
    """Raise EnvironmentFault if a key or a token is missing; called before training, so that none is wasted."""
    if section.sign:
        private_key()
    if section.publish and not has_token():
        raise EnvironmentFault(
            f"promotion.publish: to publish to {section.publish}, set HF_TOKEN, or `hf auth login`, to a token that may write "
            "there"
        )


def attest_promotion(store: Store, section: PromotionConfig, policy: Reference) -> None:
    """Write the attestations and the signature of a promotion beside a policy, before a tag points to it."""
    if section.attest:
        attest(store, policy)
    if section.sign:
        sign(store, policy, private_key())


def without_secrets(data: bytes) -> bytes:
    """An attestation without secrets, which other programs may have put beside the artifact; unchanged if it has none."""
    content = json.loads(data)
    return data if (cleaned := Cutter().plain(content)) == content else _json(cleaned)


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _file(store: Store, manifest: Manifest, path: str) -> bytes | None:
    """A small file of an artifact, verified; no other file is fetched. None if there is none, or it was pruned."""
    entry = next((file for file in manifest.files if file.path == path), None)
    if entry is None or store.is_pruned(manifest.reference):
        return None
    with store.workspace.scratch() as folder:
        store.blobs.get(manifest.reference.short, entry, folder / "file")
        return (folder / "file").read_bytes()
