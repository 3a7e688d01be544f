"""Secrets are removed from a text in any notation, and other text stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignment_core.credentials import looks_secret
from alignment_core.reporting.redaction import HOME, HOST, ROW, SECRET, USER, Redactor, secret_values

VALUE = 'pä"ss/w ord&1'


def redactor(rows: bool = False) -> Redactor:
    return Redactor(
        {VALUE, "s3kr"}, Path("/srv/align"), [Path("/srv/jane")], {"jane", "root"}, {"box7.example"}, rows=rows
    )


@pytest.mark.parametrize(
    "text",
    [
        VALUE,
        json.dumps({"x": VALUE}),
        json.dumps({"x": VALUE}, ensure_ascii=False),
        repr([VALUE]),
        "https://h/?q=p%C3%A4%22ss%2Fw%20ord%261",
        "<b>pä&quot;ss/w ord&amp;1</b>",
        "Basic cMOkInNzL3cgb3JkJjE=",
    ],
)
def test_a_known_secret_is_removed_in_every_spelling(text: str) -> None:
    cleaned = redactor().text(text)
    assert SECRET in cleaned
    assert "ord" not in cleaned.replace("word", "")
    assert "cMOk" not in cleaned


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "hf_abc"),
        ("key AKIAABCDEFGHIJKLMNOP", "AKIA"),
        ("Authorization: Bearer abc.def.ghi", "abc.def"),
        ('{"authorization": "Basic dXNlcjpwYXNz"}', "dXNlc"),
        ("postgresql://me:hunter22@db.example/x", "hunter22"),
        ("machine h login me password hunter22", "hunter22"),
        ("GET /x?signature=abc123&rows=3", "abc123"),
        ("WANDB_API_KEY: 0123456789abcdef", "0123456789abcdef"),
        ("db_password='hunter22'", "hunter22"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\ncut off", "MIIE"),
        ("token ghp_abcdefghijklmnopqrstuv in a log", "ghp_"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.abc-def", "eyJz"),
    ],
)
def test_texts_of_the_shape_of_a_secret_are_removed(text: str, secret: str) -> None:
    cut = redactor()
    assert secret not in cut.text(text)
    assert cut.cut["secrets"] >= 1


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 512, tokens per second: 1200.5",
        "the token: it was not found",
        'eos_token="<|im_end|>"',
        "max_tokens=1024 pad_token_id=0",
        "password=None",
        "s3://bucket/prefix?rows=3",
        "sha256:0123456789abcdef0123456789abcdef",
        "/usr/lib/python3.11/site-packages/torch/nn.py",
        "root of the tree, a user, the host",
        "s3krets",
        "janet and box77",
    ],
)
def test_harmless_texts_are_unchanged(text: str) -> None:
    cut = redactor()
    assert cut.text(text) == text
    assert not +cut.cut


def test_homes_names_and_rows_are_removed() -> None:
    cut = redactor()
    assert cut.text("/srv/align/store and /srv/jane/x and /home/eve/y and /root/z") == (
        f"$ALIGN_HOME/store and {HOME}/x and {HOME}/y and {HOME}/z"
    )
    assert cut.text("JANE on box7.example, s3kr") == f"{USER} on {HOST}, {SECRET}"
    row = 'the verifier gave "2\\" for it" for the prompt \'my row\''
    assert "my row" not in cut.text(row)
    assert ROW in cut.text(row)
    assert "my row" in redactor(rows=True).text(row)


def test_fields_with_names_of_secrets_are_removed_whole_and_markup_stays_valid() -> None:
    cut = redactor()
    content = {"api_key": "x", "nested": [{"my_token": "y", "token_variable": "MY_TOKEN"}], "tokens": 3}
    assert cut.plain(content) == {
        "api_key": SECRET,
        "nested": [{"my_token": SECRET, "token_variable": "MY_TOKEN"}],
        "tokens": 3,
    }
    assert cut.markup("<text>s3kr</text>") == "<text>&lt;removed&gt;</text>"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(("WANDB_API_KEY", True), ("MY_TOKEN_2", True), ("password", True), ("AWS_SECRET_ACCESS_KEY", True)),
        *(("key", False), ("eos_token", False), ("TOKEN_FILE", False), ("AUTH_METHOD", False), ("KEYBOARD", False)),
    ],
)
def test_names_of_secrets_are_recognised(name: str, secret: bool) -> None:
    assert looks_secret(name) is secret


def test_secrets_of_this_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, name in (("NETRC", "netrc"), ("AWS_SHARED_CREDENTIALS_FILE", "aws")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "netrc").write_text(
        "machine a.example login me password of-netrc\ndefault login you password of-default\n"
    )
    (tmp_path / "aws").write_text("[default]\nregion = eu-west-1\naws_secret_access_key = of-aws\n")
    file = tmp_path / "token"
    file.write_text("of-a-file-0123\n")
    environ = {
        "MY_TOKEN": "of-a-variable",
        "RAY_AUTH_TOKEN_PATH": str(file),
        "CUSTOM": "named-by-the-recipe",
        "DATABASE_URL": "postgresql://me:p%40ssw0rd@h/x",
        "API_TOKEN": "auto",
        "SHORT_TOKEN": "abc",
        "MY_KEY_PATH": str(tmp_path),
    }
    values = secret_values(environ, {"tracking": {"token_variable": "CUSTOM"}})
    assert {"of-a-variable", "of-a-file-0123", "named-by-the-recipe", "p@ssw0rd"} <= values
    assert {"of-netrc", "of-default", "of-aws"} <= values
    assert not values & {"auto", "abc", "me", "you", "eu-west-1", str(tmp_path)}


@pytest.mark.parametrize(
    "piece",
    ["a", "a_", "token=", "a://b@", 'gave "', "\\", "-----BEGIN PRIVATE KEY-----", "login x password ", "?a=b&"],
)
def test_a_hostile_text_of_a_mebibyte_ends(piece: str) -> None:
    text = redactor().text('gave "' + piece * ((1 << 20) // len(piece)) + " s3kr")
    assert "s3kr" not in text
