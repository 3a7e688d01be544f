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
    """Read every byte again and compare digests; with a public key, also check the signature of REFERENCE.

    Exit code 1 if something is damaged, unsigned, signed with another key, or not what was signed.
    """
    if public_key and reference is None:
        raise UserError("--public-key checks one artifact's signature: name the artifact")
    opened = open_store(store, writes=False)
    chosen = [opened.resolve(reference)] if reference else [manifest.reference for manifest in opened.artifacts()]
    problems = {str(one): found for one in chosen if (found := opened.verify(one))}
    pruned = [str(one) for one in chosen if str(one) not in problems and opened.is_pruned(one)]
    damage = problems.get(str(chosen[0]), []) if chosen else []
    signature = _signature(opened, chosen[0], public_key, damage) if reference and not pruned else None
    if as_json:
        checked = {"signature": signature} if signature else {}
        print_json({"verified": len(chosen) - len(pruned), "problems": problems, "pruned": pruned, **checked})
    else:
        for one, what in problems.items():
            out.print(f"{one}\n  " + "\n  ".join(what), markup=False)
        gone = f", {len(pruned)} pruned" if pruned else ""
        out.print(f"{len(chosen) - len(pruned)} verified, {len(problems)} damaged{gone}")
        if signature:
            out.print(f"signature {signature['state']}: {signature['sentence']}", markup=False)
    if problems or (signature and signature["state"] != "valid"):
        raise typer.Exit(1)


def _signature(store: Store, reference: Reference, named: str | None, damage: list[str]) -> dict[str, Any] | None:
    """What became of checking a signature; None where no key is given. This machine's cache may hold a copy without the
    ``damage`` that the store's has."""
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
        typer.Option("--output", "-o", help="Write them, and the signature if there is one, to this folder instead."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an artifact's provenance (in-toto, SLSA) and bill of materials (CycloneDX) beside it in the store."""
    from alignment_core.artifacts.attachments import attachment
    from alignment_core.attestation import attesting
    from alignment_core.attestation.signing import SIGNATURE

    opened = open_store(store, writes=output is None)
    chosen = opened.resolve(reference)
    if output is None:
        made = attesting.attest(opened, chosen)
    else:
        made = attesting.attestations(opened, chosen)
        if (signed := attachment(opened, chosen, SIGNATURE)) is not None:
            made[SIGNATURE] = signed
        _write(output, made)
    places = {name: str(output / name) if output else f"beside {chosen.short} in {opened.uri}" for name in sorted(made)}
    if as_json:
        return print_json({"reference": str(chosen), "files": places})
    if attesting.PROVENANCE not in made:
        out.print(f"no provenance: {chosen.short} was brought into the store, and made by no stage", markup=False)
    return out.print("\n".join(f"{name}: {place}" for name, place in places.items()), markup=False)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be written: {error.strerror}") from None


def sign(reference: str, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Sign an artifact with the private key at $ALIGN_SIGNING_KEY; the signature lies beside it in the store."""
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
        str | None, typer.Option("--tag", help="A git tag for this version, beside the artifact's own (sha256-…).")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public. Default: private.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a model or a data set as an ordinary repository on the Hugging Face Hub, in one commit."""
    from alignment_core.attestation.publishing import publish

    opened = open_store(store, writes=False)
    chosen = opened.resolve(reference)
    done = publish(opened, chosen, repository, tag, public)
    state = "published" if done.new else "unchanged"
    if as_json:
        found = {"commit": done.commit, "tags": list(done.tags), "url": done.url}
        return print_json({"reference": str(chosen), "state": state, **found})
    return out.print(f"{done.url}: {state}, commit {done.commit}, tag {', '.join(done.tags)}", markup=False)
