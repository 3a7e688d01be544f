"""Signatures of artifacts by an elliptic-curve key, as the package model-signing (OpenSSF) makes and checks them.

A signature is over the folder of the artifact as it is fetched, so that ``model_signing verify key`` checks a copy of that
folder without this project. With the public key, neither the store nor the transport has to be trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.attachments import attach, attachment
from alignment_core.errors import Corrupt, EnvironmentFault, NotFound, UserError

SIGNATURE = "model.sig"
"""Name of the file beside an artifact: a Sigstore bundle."""
PRIVATE, PUBLIC = "ALIGN_SIGNING_KEY", "ALIGN_SIGNING_PUBLIC_KEY"
"""Environment variables: paths of PEM files."""
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_HOW = "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes one"


@dataclass(frozen=True)
class Verdict:
    """The result of a signature check."""

    state: Literal["valid", "unsigned", "wrong key", "tampered"]
    sentence: str


def private_key() -> Path:
    """The key that this machine signs with. Raises EnvironmentFault if it cannot sign."""
    named = os.environ.get(PRIVATE)
    if not named:
        raise EnvironmentFault(
            f"to sign, set {PRIVATE} to the path of an elliptic-curve private key (PEM, without a password); {_HOW}"
        )
    _load(Path(named), private=True)
    return Path(named)


def public_key(named: str | None) -> Path | None:
    """The key to check signatures with: the ``named`` one, or that of the environment; None if there is neither.

    Raises UserError or EnvironmentFault for a file without a key.
    """
    if not (path := named or os.environ.get(PUBLIC)):
        return None
    try:
        _load(Path(path), private=False)
    except EnvironmentFault as error:
        if named and "model-signing" not in str(error):
            raise UserError(str(error)) from None
        raise
    return Path(path)


def sign(store: Store, reference: Reference, key: Path) -> bool:
    """Sign an artifact, and put the signature beside it; False if there is a valid one by this key.

    Every byte is verified first. Raises EnvironmentFault for an unusable key, NotFound or Corrupt for such an artifact.
    """
    _, public = _load(key, private=True)
    with store.workspace.scratch() as folder, ExitStack() as until:
        (folder / "public").write_bytes(public)
        if verify_signature(store, reference, folder / "public").state == "valid":
            return False
        from model_signing import signing

        signature = folder / SIGNATURE
        signing.Config().use_elliptic_key_signer(private_key=key).sign(store.fetch(reference, until), signature)
        attach(store, reference, {SIGNATURE: signature.read_bytes()})
    return True


def verify_signature(store: Store, reference: Reference, key: Path) -> Verdict:
    """Check the signature of an artifact with a public key, against every byte of it. Raises NotFound if it was pruned."""
    data = attachment(store, reference, SIGNATURE)
    if data is None:
        return Verdict("unsigned", f"{reference.short} has no signature")
    _, public = _load(key, private=False)
    if (hint := _hint(data)) is None:
        return Verdict("tampered", f"the signature of {reference.short} cannot be read")
    if hint != hashlib.sha256(public).hexdigest():
        return Verdict("wrong key", f"{reference.short} was signed with another key than that of {key}")
    with ExitStack() as until:
        try:
            folder = store.fetch(reference, until)
        except (Corrupt, NotFound) as error:
            if store.is_pruned(reference):
                raise
            return Verdict("tampered", str(error))
        return _checked(reference, data, folder, key, store)


def _checked(reference: Reference, data: bytes, folder: Path, key: Path, store: Store) -> Verdict:
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    with store.workspace.scratch() as scratch:
        (scratch / SIGNATURE).write_bytes(data)
        config = verifying.Config().use_elliptic_key_verifier(public_key=key)
        try:
            config.verify(folder, scratch / SIGNATURE)
        except InvalidSignature:
            return Verdict("tampered", f"the signature of {reference.short} was changed after it was made")
        except (ValueError, KeyError, TypeError) as error:  # errors of its parsers and comparisons
            return Verdict("tampered", f"{reference.short} differs from the signed files: {error}")
    return Verdict("valid", f"{reference.short} was signed by the owner of {key}, and is unchanged")


def _hint(signature: bytes) -> str | None:
    """SHA-256 of the public key that a signature names; None if it is not a signature."""
    try:
        hint = json.loads(signature)["verificationMaterial"]["publicKey"]["hint"]
    except (ValueError, KeyError, TypeError):
        return None
    return hint if isinstance(hint, str) else None


def _load(path: Path, private: bool) -> tuple[Any, bytes]:
    """A key, and its public half as PEM. Raises EnvironmentFault if the file has no key that can sign."""
    try:
        import model_signing  # noqa: F401 (callers need it)
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise EnvironmentFault(
            f"signatures need the package model-signing ({error}): pip install 'alignment[signing]'"
        ) from None
    half = "private" if private else "public"
    try:
        data = path.read_bytes()
        key: Any = (
            serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
        )
    except OSError as error:
        raise EnvironmentFault(f"the {half} key {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise EnvironmentFault(f"{path} holds no {half} key in PEM without a password ({error}); {_HOW}") from None
    public = key.public_key() if private else key
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name not in _CURVES:
        raise EnvironmentFault(f"{path} holds a key of another kind than P-256, P-384 or P-521; {_HOW}")
    pem = serialization.Encoding.PEM
    return key, public.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
