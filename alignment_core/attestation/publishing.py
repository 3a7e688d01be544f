"""Publishing an artifact of the store as an ordinary repository on the Hugging Face Hub."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.attachments import attachments
from alignment_core.attestation.ancestry import ancestry_of
from alignment_core.attestation.attest import BOM, PROVENANCE, without_secrets
from alignment_core.attestation.bom import MODELS
from alignment_core.attestation.card import data_card, model_card
from alignment_core.attestation.model_repo import Published, RepoKind, publish_files, repo_of
from alignment_core.attestation.signing import SIGNATURE
from alignment_core.errors import UserError
from alignment_core.printable import printable

README = "README.md"


def publish(store: Store, reference: Reference, uri: str, tag: str | None = None, public: bool = False) -> Published:
    """Publish a model or a data set to ``hf://organisation/name``, with its attestations, its signature and a README.

    The commit gets the tag :func:`tag_of`, and ``tag`` as well. Raises the errors of
    :func:`~alignment_core.attestation.model_repo.publish_files`, and UserError for another kind of artifact.
    """
    repo, kind = repo_of(uri), _repo_kind(reference)
    manifest, ancestry = store.manifest(reference), ancestry_of(store, reference)
    beside = {
        name: data if name == SIGNATURE else without_secrets(data)
        for name, data in attachments(store, reference).items()
        if name in (PROVENANCE, BOM, SIGNATURE)  # no attachment of another kind
    }
    page = (model_card if kind == "model" else data_card)(manifest, ancestry, repo, beside)
    tags = (tag_of(reference), *([tag] if tag else []))
    with ExitStack() as until:
        folder = store.fetch(reference, until)
        own: dict[str, Path | bytes] = {entry.path: folder / entry.path for entry in manifest.files}
        files = {README: printable(page).encode(), **beside, **own}
        return publish_files(repo, kind, files, tags, f"Publish {reference.short}", private=not public)


def tag_of(reference: Reference) -> str:
    """The git tag of an artifact, which still leads to it after later publications."""
    return f"sha256-{reference.digest[:12]}"


def _repo_kind(reference: Reference) -> RepoKind:
    if reference.kind in MODELS:
        return "model"
    if reference.kind == "dataset":
        return "dataset"
    raise UserError(f"{reference.short} is a {reference.kind}: only models and data sets can be published on the Hub")
