"""The machine's settings for a store in S3: region and encryption of uploads; and the reasons of a server in errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from alignment_core.artifacts import open_store
from alignment_core.artifacts.downloads import PART
from alignment_core.artifacts.s3 import S3Backend
from alignment_core.artifacts.s3_client import encryption, new_client
from alignment_core.errors import EnvironmentFault, UserError
from tests.servers.faulty import Fault, Faulty
from tests.servers.s3 import S3Server

KEY = "arn:aws:kms:us-east-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No AWS settings but a file with two profiles."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n[profile other]\nregion = sa-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({}, "ap-south-1"),
        ({"AWS_PROFILE": "other"}, "sa-east-1"),
        ({"AWS_DEFAULT_REGION": "us-west-2", "AWS_PROFILE": "other"}, "us-west-2"),
        ({"AWS_REGION": "eu-central-1"}, "eu-central-1"),
        ({"AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "us-west-2"}, "eu-central-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "us-west-2"}, "us-west-2"),
        ({"AWS_CONFIG_FILE": os.devnull}, "us-east-1"),
    ],
)
@pytest.mark.usefixtures("profiles")
def test_the_region_is_that_of_the_aws_cli(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], region: str
) -> None:
    """AWS CLI user guide, environment variables: AWS_REGION overrides AWS_DEFAULT_REGION, and both override the profile."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = new_client()
    assert client.meta.region_name == region
    assert region in client.meta.endpoint_url or region == "us-east-1"


@pytest.fixture
def proxy(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    with Faulty(s3_server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.mark.parametrize(
    ("variables", "algorithm", "key"),
    [
        ({}, None, None),
        ({"ALIGN_S3_SSE": "AES256"}, "AES256", None),
        ({"ALIGN_S3_SSE": "aws:kms", "ALIGN_S3_SSE_KMS_KEY_ID": KEY}, "aws:kms", KEY),
    ],
)
def test_every_upload_is_encrypted_as_the_environment_sets(
    bucket: str,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    algorithm: str | None,
    key: str | None,
) -> None:
    """The server reports each object's encryption, as requested at its upload."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    large = tmp_path / "large"
    large.write_bytes(b"x" * (PART + 1))
    store = open_store(f"s3://{bucket}/{tmp_path.name}")
    backend = store.backend
    assert isinstance(backend, S3Backend)
    version = backend.put("uses/small", b"1")
    assert backend.put("uses/small", b"2", replaces=version)
    assert backend.put("blobs/large", large)
    plain = new_client()
    for name in ("format.json", "uses/small", "blobs/large"):
        head = plain.head_object(Bucket=bucket, Key=f"{tmp_path.name}/{name}")
        expected = (
            (algorithm, key) if algorithm else (head.get("ServerSideEncryption"), None)
        )  # the default of the bucket
        assert (head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")) == expected, name
    assert backend.read("uses/small") == b"2"
    assert b"".join(backend.stream("blobs/large")) == large.read_bytes()


@pytest.mark.parametrize(
    ("variables", "parameters"),
    [
        ({"ALIGN_S3_SSE": "aws:kms"}, {"ServerSideEncryption": "aws:kms"}),
        ({"ALIGN_S3_SSE": "aws:kms:dsse"}, {"ServerSideEncryption": "aws:kms:dsse"}),
        ({"ALIGN_S3_SSE_KMS_KEY_ID": KEY}, {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KEY}),
    ],
)
def test_the_parameters_are_those_of_the_s3_api(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], parameters: dict[str, str]
) -> None:
    """The S3 API reference, PutObject: x-amz-server-side-encryption is AES256, aws:kms or aws:kms:dsse."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert encryption() == parameters


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"ALIGN_S3_SSE": "kms"}, "ALIGN_S3_SSE is 'kms': set it to AES256, aws:kms or aws:kms:dsse"),
        ({"ALIGN_S3_SSE": "AES256", "ALIGN_S3_SSE_KMS_KEY_ID": KEY}, "set ALIGN_S3_SSE to aws:kms"),
    ],
)
def test_an_encryption_that_s3_does_not_know_is_refused(
    bucket: str, home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=sentence):
        open_store(f"s3://{bucket}/new")


@pytest.mark.parametrize(
    ("status", "code", "cure"),
    [
        (403, "AccessDenied", "set ALIGN_S3_SSE if the bucket requires encryption"),
        (400, "AuthorizationHeaderMalformed", "set AWS_REGION to it"),
        (403, "AllAccessDisabled", ""),
        (400, "KMS.DisabledException", ""),
    ],
)
def test_an_error_has_the_servers_code_and_reason_and_the_fix(
    proxy: Faulty, bucket: str, tmp_path: Path, status: int, code: str, cure: str
) -> None:
    proxy.rule = lambda *_: Fault(status=status, code=code)
    with pytest.raises(Exception, match=r"cannot write s3://bucket/.*one: ") as caught:
        S3Backend(bucket, f"{tmp_path.name}/").put("one", b"1")
    assert f"{code}, a fault on purpose" in str(caught.value)
    assert cure in str(caught.value)
    assert status != 403 or isinstance(caught.value, EnvironmentFault)


def test_the_s3_server_of_the_tests_listens_on_loopback_alone(s3_server: S3Server) -> None:
    """Its credentials are public, and it writes uploads to the disk."""
    assert s3_server.process is not None
    process = psutil.Process(s3_server.process.pid)
    sockets = [
        socket
        for child in (process, *process.children(recursive=True))
        for socket in child.net_connections(kind="inet")
    ]
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in sockets
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", s3_server.port)}
    assert [connection for connection in sockets if connection.type == SOCK_DGRAM] == []
