"""Signatures: four outcomes that cannot be mistaken for each other, and a tool of others that agrees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.artifacts import open_store
from alignment_core.artifacts.attachments import attach, attachment
from alignment_core.artifacts.paths import blob_path
from alignment_core.attestation.signing import PRIVATE, PUBLIC, SIGNATURE, private_key, sign, verify_signature
from alignment_core.errors import EnvironmentFault
from tests.align import align_here


def state(store, reference, key: Path) -> str:
    return verify_signature(store, reference, key).state


def test_unsigned_signed_wrong_key_and_tampered_are_four_outcomes(store, references, keys):
    (private, public), (_, other) = keys("one"), keys("two")
    assert state(store, references["sft"], public) == "unsigned"
    assert sign(store, references["sft"], private)
    assert state(store, references["sft"], public) == "valid"
    assert state(store, references["sft"], other) == "wrong key"
    blob = Path(store.uri) / blob_path(store.manifest(references["sft"]).files[0].sha256)
    blob.chmod(0o644)
    blob.write_bytes(b"other bytes")
    shutil.rmtree(store.workspace.cache, ignore_errors=True)
    assert state(open_store(store.uri), references["sft"], public) == "tampered"


def test_another_artifacts_signature_and_an_edited_one_are_tampered(store, references, keys):
    private, public = keys("one")
    sign(store, references["base"], private)
    theirs = attachment(store, references["base"], SIGNATURE)
    assert theirs
    attach(store, references["sft"], {SIGNATURE: theirs})
    assert state(store, references["sft"], public) == "tampered"
    sign(store, references["sft"], private)
    bundle = json.loads(attachment(store, references["sft"], SIGNATURE) or b"")
    bundle["dsseEnvelope"]["payload"] = json.loads(theirs)["dsseEnvelope"]["payload"]
    attach(store, references["sft"], {SIGNATURE: json.dumps(bundle).encode()})
    assert state(store, references["sft"], public) == "tampered"
    for nonsense in (b"{}", b"no signature", b'{"verificationMaterial": {"publicKey": {"hint": 1}}}'):
        attach(store, references["sft"], {SIGNATURE: nonsense})
        assert state(store, references["sft"], public) == "tampered"


def test_a_valid_signature_by_the_same_key_is_kept_and_by_another_key_replaced(store, references, keys):
    (first, _), (second, public) = keys("one"), keys("two", "secp384r1")
    assert sign(store, references["sft"], first)
    kept = attachment(store, references["sft"], SIGNATURE)
    assert not sign(store, references["sft"], first)
    assert attachment(store, references["sft"], SIGNATURE) == kept
    assert sign(store, references["sft"], second)
    assert state(store, references["sft"], public) == "valid"


def test_the_tool_of_model_signing_verifies_a_copy_of_the_fetched_folder(store, references, keys, tmp_path):
    private, public = keys("one")
    sign(store, references["sft"], private)
    copy, signature = tmp_path / "copy", tmp_path / "model.sig"
    shutil.copytree(store.fetch(references["sft"]), copy)
    signature.write_bytes(attachment(store, references["sft"], SIGNATURE) or b"")
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(copy)]
    command += ["--signature", str(signature), "--public_key", str(public)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (copy / "content").chmod(0o644)
    (copy / "content").write_text("other")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_an_unusable_signing_key_is_refused(keys, tmp_path, monkeypatch):
    monkeypatch.delenv(PRIVATE, raising=False)
    with pytest.raises(EnvironmentFault, match=f"set {PRIVATE} to the path"):
        private_key()
    private, public = keys("one")
    (tmp_path / "text").write_text("no key")
    for path, sentence in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path / "text", "holds no private key"),
        (public, "holds no private key"),
        (keys("other", "secp256k1")[0], "of another kind than P-256"),
    ):
        monkeypatch.setenv(PRIVATE, str(path))
        with pytest.raises(EnvironmentFault, match=sentence):
            private_key()
    monkeypatch.setenv(PRIVATE, str(private))
    assert private_key() == private


def test_the_commands_sign_attest_and_verify_with_exit_codes(store, references, keys, tmp_path, monkeypatch):
    (private, public), (_, other) = keys("one"), keys("two")
    reference = references["sft"].short

    def align(*arguments: str, code: int = 0) -> dict:
        done = align_here(tmp_path / "home", *arguments, "--store", store.uri, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def checked(*key: str, code: int) -> str:
        return align("artifacts", "verify", reference, *key, code=code)["signature"]["state"]

    assert checked("--public-key", str(public), code=1) == "unsigned"
    monkeypatch.setenv(PRIVATE, str(private))
    assert align("artifacts", "sign", reference)["state"] == "signed"
    assert align("artifacts", "sign", reference)["state"] == "unchanged"
    assert checked("--public-key", str(public), code=0) == "valid"
    assert checked("--public-key", str(other), code=1) == "wrong key"
    monkeypatch.setenv(PUBLIC, str(public))
    assert checked(code=0) == "valid"
    assert "signature" not in align("artifacts", "verify"), "most artifacts are unsigned"
    align("artifacts", "attest", reference, "-o", str(tmp_path / "out"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "bom.cdx.json",
        "model.sig",
        "provenance.intoto.json",
    ]
    assert attachment(store, references["sft"], "bom.cdx.json") is None
    align("promote", reference, "--attest")
    assert attachment(store, references["sft"], "bom.cdx.json") == (tmp_path / "out" / "bom.cdx.json").read_bytes()
    align("artifacts", "verify", "--public-key", str(public), code=2)
    align("artifacts", "verify", reference, "--public-key", str(tmp_path / "none"), code=2)
    monkeypatch.setenv(PRIVATE, str(public))
    align("artifacts", "sign", reference, code=3)
