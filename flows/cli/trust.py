"""The commands of ``align artifacts`` about trust: verify, attest, sign, publish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from alignment.flows.console import JsonOption, StoreOption, out, print_json
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.errors import EnvironmentFault, UserError


def register(app: typer.Typer) -> None:
    """Add the commands to those of ``align artifacts``."""
    for command in (verify, attest, sign, publish):
        app.command()(command)


def verify(
    reference: Annotated[str | None, typer.Argument(help="Only this artifact. Default: all.")] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            "--public-key",
            help="Also check the artifact's signature with this key (PEM). Default: $ALIGN_SIGNING_PUBLIC_KEY.",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read artifacts again and compare digests; with a public key, also check the signature of REFERENCE.

    Exit code 1 for a damaged artifact, a missing or foreign signature, or content that differs from the signed one.
    """
    if public_key and reference is None:
        raise UserError("--public-key checks one artifact's signature: name the artifact")
    opened = open_store(store, writes=False)
    chosen = [opened.resolve(reference)] if reference else [manifest.reference for manifest in opened.artifacts()]
    verified = {str(artifact): opened.verify(artifact) for artifact in chosen}
    problems = {artifact: damages for artifact, damages in verified.items() if damages}
    pruned = [str(artifact) for artifact in chosen if str(artifact) not in problems and opened.is_pruned(artifact)]
    damage = problems.get(str(chosen[0]), []) if chosen else []
    signature = _signature(opened, chosen[0], public_key, damage) if reference and not pruned else None
    if as_json:
        checked = {"signature": signature} if signature else {}
        print_json({"verified": len(chosen) - len(pruned), "problems": problems, "pruned": pruned, **checked})
    else:
        for artifact, damages in problems.items():
            out.print("\n  ".join([artifact, *damages]), markup=False)
        also = f", {len(pruned)} pruned" if pruned else ""
        out.print(f"{len(chosen) - len(pruned)} verified, {len(problems)} damaged{also}")
        if signature:
            out.print(f"signature {signature['state']}: {signature['sentence']}", markup=False)
    if problems or (signature and signature["state"] != "valid"):
        raise typer.Exit(1)


def _signature(store: Store, reference: Reference, named: str | None, damage: list[str]) -> dict[str, Any] | None:
    """The verdict on a signature; None without a key. ``damage`` is that of the store's copy: this machine's cache may hold an
    undamaged one."""
    from alignment_core.attestation import signing

    key = signing.public_key(named)
    if key is None:
        return None
    verdict = signing.verify_signature(store, reference, key)
    if damage and verdict.state == "valid":
        verdict = signing.Verdict("tampered", damage[0])
    return {"state": verdict.state, "sentence": verdict.sentence}


def attest(
    reference: str,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the files, and the signature if there is one, to this folder instead."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an artifact's provenance (in-toto, SLSA) and bill of materials (CycloneDX) beside it in the store."""
    from alignment_core.artifacts.attachments import attachment
    from alignment_core.attestation.attest import PROVENANCE, attestations
    from alignment_core.attestation.attest import attest as write_attestations
    from alignment_core.attestation.signing import SIGNATURE

    opened = open_store(store, writes=output is None)
    chosen = opened.resolve(reference)
    if output is None:
        files = write_attestations(opened, chosen)
    else:
        files = attestations(opened, chosen)
        if (signature := attachment(opened, chosen, SIGNATURE)) is not None:
            files[SIGNATURE] = signature
        _write(output, files)
    places = {
        name: str(output / name) if output else f"beside {chosen.short} in {opened.uri}" for name in sorted(files)
    }
    if as_json:
        return print_json({"reference": str(chosen), "files": places})
    if PROVENANCE not in files:
        out.print(f"no provenance: {chosen.short} was imported into the store, not made by a stage", markup=False)
    return out.print("\n".join(f"{name}: {place}" for name, place in places.items()), markup=False)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be written: {error.strerror}") from None


def sign(reference: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Sign an artifact with the private key at $ALIGN_SIGNING_KEY; the signature is stored beside it."""
    from alignment_core.attestation import signing

    key = signing.private_key()
    opened = open_store(store)
    chosen = opened.resolve(reference)
    state = "signed" if signing.sign(opened, chosen, key) else "unchanged"
    if as_json:
        return print_json({"reference": str(chosen), "state": state})
    return out.print(f"{chosen.short}: {state}", markup=False)


def publish(
    reference: str,
    repository: Annotated[str, typer.Argument(metavar="hf://ORGANISATION/NAME", help="Repository on the Hub.")],
    tag: Annotated[
        str | None, typer.Option("--tag", help="Git tag for this version, beside the artifact's own (sha256-…).")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a model or a data set as an ordinary repository on the Hugging Face Hub, in one commit."""
    from alignment_core.attestation.publishing import publish

    opened = open_store(store, writes=False)
    chosen = opened.resolve(reference)
    publication = publish(opened, chosen, repository, tag, public)
    state = "published" if publication.new else "unchanged"
    if as_json:
        details = {"commit": publication.commit, "tags": list(publication.tags), "url": publication.url}
        return print_json({"reference": str(chosen), "state": state, **details})
    return out.print(
        f"{publication.url}: {state}, commit {publication.commit}, tag {', '.join(publication.tags)}", markup=False
    )
