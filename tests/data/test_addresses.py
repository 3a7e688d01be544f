"""Rows at addresses: on the tests' S3 server, a web server over TLS and the tests' Hub."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import botocore.session
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from huggingface_hub import HfApi

from alignment_core.data import addresses, kinds
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.errors import DataError, EnvironmentFault, Unavailable, UserError
from alignment_core.recipes import ModelConfig
from alignment_core.recipes.sections.data import DataSource
from tests.servers.files import FileServer, file_server
from tests.servers.hub import ORGANISATION, TOKEN, HubServer

ROWS = [{"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "2"}]
MORE = [{"prompt": "c", "completion": "3"}]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def rows_of(pinned: PinnedSource) -> list[dict[str, Any]]:
    return [row for _, row in read(pinned)]


def read(pinned: PinnedSource) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for where, row in pinned.read(0, 0, kinds.load("demonstrations")):
        assert isinstance(row, dict)
        rows.append((where, row))
    return rows


def at(path: str, **fields: Any) -> PinnedSource:
    return pin(DataSource(path=path, **fields))


Put = Callable[[str, bytes], None]


@pytest.fixture
def put(bucket: str) -> Put:
    client = botocore.session.get_session().create_client("s3")

    def put_object(key: str, body: bytes) -> None:
        client.put_object(Bucket=bucket, Key=key, Body=body)

    return put_object


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", lines(ROWS)),
        ("rows.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.csv", b"prompt,completion\na,1\nb,2\n"),
        ("rows.parquet", parquet(ROWS)),
    ],
)
def test_object_gives_the_rows_of_a_local_file(put: Put, tmp_path: Path, name: str, content: bytes) -> None:
    put(f"formats/{name}", content)
    (tmp_path / name).write_bytes(content)
    remote, local = at(f"s3://bucket/formats/{name}"), at(str(tmp_path / name))
    assert read(remote) == read(local)
    assert rows_of(remote) == ROWS
    assert remote.name == local.name == name


def test_glob_and_folder_give_their_files_in_the_order_of_names(put: Put) -> None:
    put("many/b/train-2.jsonl", lines(MORE))
    put("many/b/train-1.parquet", parquet(ROWS))
    put("many/a/train-1.jsonl", lines(ROWS))
    put("many/a/test-1.jsonl", lines(MORE))
    put("many/a/README.md", b"about the rows")
    assert [where for where, _ in read(at("s3://bucket/many/*/train-*"))] == [
        "a/train-1.jsonl:1",
        "a/train-1.jsonl:2",
        "b/train-1.parquet:1",
        "b/train-1.parquet:2",
        "b/train-2.jsonl:1",
    ]
    folder = at("s3://bucket/many/a/")
    assert [where for where, _ in read(folder)] == ["train-1.jsonl:1", "train-1.jsonl:2"]
    assert rows_of(at("s3://bucket/many/a", split="test")) == MORE
    with pytest.raises(UserError, match="has no split 'dev'; it has train, test"):
        at("s3://bucket/many/a/", split="dev")


def test_rows_of_an_object_that_changed_after_pinning_are_refused(put: Put) -> None:
    put("changed/rows.jsonl", lines(ROWS))
    pinned = at("s3://bucket/changed/rows.jsonl")
    put("changed/rows.jsonl", lines(MORE))
    with pytest.raises(
        DataError, match=r"s3://bucket/changed/rows.jsonl: is gone or has changed since this run started"
    ):
        read(pinned)


def test_object_that_changes_while_being_read_is_refused(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "BLOCK", 1 << 16)
    many = [{"prompt": f"{number}", "completion": "1"} for number in range(100_000)]
    put("changing/rows.jsonl", lines(many))
    rows = at("s3://bucket/changing/rows.jsonl").read(0, 0, kinds.load("demonstrations"))
    next(rows)
    put("changing/rows.jsonl", lines(many[::-1]))
    with pytest.raises(DataError, match="has changed since this run started"):
        list(rows)


def test_key_follows_content_and_not_the_place_or_time(put: Put) -> None:
    put("here/rows.jsonl", lines(ROWS))
    put("there/rows.jsonl", lines(ROWS))
    first = at("s3://bucket/here/rows.jsonl").content()
    assert first == at("s3://bucket/there/rows.jsonl").content()
    put("here/rows.jsonl", lines(ROWS))
    assert first == at("s3://bucket/here/rows.jsonl").content()
    put("here/rows.jsonl", lines(MORE))
    assert first != at("s3://bucket/here/rows.jsonl").content()


def test_two_machines_pin_the_same_content(put: Put, tmp_path: Path) -> None:
    put("machines/rows.jsonl", lines(ROWS))
    code = (
        "import json; from alignment_core.data.pin import pin; from alignment_core.recipes import DataSource;"
        "print(json.dumps(pin(DataSource(path='s3://bucket/machines/rows.jsonl')).content()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, check=True
    )
    assert json.loads(other.stdout) == at("s3://bucket/machines/rows.jsonl").content()


PIN_AND_READ = """
import json, sys
from alignment_core.data import addresses, kinds
from alignment_core.data.pin import pin
from alignment_core.errors import DataError
from alignment_core.recipes import DataSource

addresses.BLOCK = 1 << 16
print("imported", flush=True)
for order in sys.stdin:
    rows, refusal = [], ""
    try:
        pinned = pin(DataSource(path="s3://bucket/raced/rows.jsonl"))
        rows = list(pinned.read(0, 0, kinds.load("demonstrations")))
    except DataError as error:
        refusal = str(error)
    versions = sorted({row["completion"] for _, row in rows})
    print(json.dumps([pinned.remote[0].version, len(rows), versions, refusal]), flush=True)
"""


def test_object_that_changes_while_two_processes_pin_it_is_read_in_one_version_or_refused(bucket: str) -> None:
    """Each process pins and reads an object of several blocks while it is replaced again and again."""
    client = botocore.session.get_session().create_client("s3")
    rounds, count = 8, 3000
    contents = {name: lines([{"prompt": "a" * 40, "completion": name}] * count) for name in ("old", "new")}

    def put_version(name: str) -> str:
        etag: str = client.put_object(Bucket=bucket, Key="raced/rows.jsonl", Body=contents[name])["ETag"]
        return etag

    versions = {put_version(name): name for name in contents}
    command = [sys.executable, "-c", PIN_AND_READ]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        both = (first, second)

        def send() -> None:
            for process in both:
                assert process.stdin is not None
                process.stdin.write("pin\n")
                process.stdin.flush()

        def receive() -> list[str]:
            return [process.stdout.readline() for process in both if process.stdout is not None]

        assert receive() == ["imported\n"] * 2
        for number in range(rounds):
            send()
            for name in ("old", "new") * (1 + number):
                put_version(name)
            for line in receive():
                version, read_rows, completions, refusal = json.loads(line)
                whole = (read_rows, completions) == (count, [versions[version]])
                changed = refusal == "s3://bucket/raced/rows.jsonl: is gone or has changed since this run started"
                assert whole or changed, (versions[version], read_rows, completions, refusal)
        send()
        assert [json.loads(line)[1:] for line in receive()] == [[count, ["new"], ""]] * 2
        for process in both:
            assert process.stdin is not None
            process.stdin.close()


def test_a_server_that_sends_less_than_the_file_is_asked_again(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a file that ends early would be missing without a word."""
    put("short/rows.jsonl", lines(ROWS))
    fetch = s3fs.core.S3File._fetch_range
    answers = [b""]
    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", lambda *place: answers.pop() if answers else fetch(*place))
    monkeypatch.setattr(addresses, "time", SimpleNamespace(sleep=lambda seconds: None))
    assert rows_of(at("s3://bucket/short/rows.jsonl")) == ROWS
    assert not answers


def test_a_version_of_an_object_can_be_named(put: Put) -> None:
    client = botocore.session.get_session().create_client("s3")
    client.create_bucket(Bucket="versioned")
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    version = client.put_object(Bucket="versioned", Key="rows.jsonl", Body=lines(ROWS))["VersionId"]
    client.put_object(Bucket="versioned", Key="rows.jsonl", Body=lines(MORE))
    assert rows_of(at("s3://versioned/rows.jsonl")) == MORE
    assert rows_of(at(f"s3://versioned/rows.jsonl?versionId={version}")) == ROWS


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("s3://bucket/missing/rows.jsonl", "path: s3://bucket/missing/rows.jsonl: there is no such file"),
        ("s3://bucket/missing/*.jsonl", r"path: s3://bucket/missing/\*.jsonl: there is no such file"),
        ("s3://bucket/missing/", "path: s3://bucket/missing/: there is no such file"),
        ("s3://nowhere/rows.jsonl", "path: .*s3://nowhere/rows.jsonl.*there is no such bucket"),
        ("s3://nowhere/*.jsonl", r"path: .*s3://nowhere/\*.jsonl.*there is no such bucket"),
    ],
)
def test_missing_object_or_bucket_is_one_sentence(bucket: str, address: str, sentence: str) -> None:
    with pytest.raises((UserError, EnvironmentFault), match=sentence) as refusal:
        at(address)
    assert "\n" not in str(refusal.value)


def test_missing_credentials_are_one_sentence(put: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put("secret/rows.jsonl", lines(ROWS))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(
        EnvironmentFault, match=r"^path: cannot read s3://bucket/secret/\*\.jsonl: there are no credentials"
    ):
        at("s3://bucket/secret/*.jsonl")


def test_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(EnvironmentFault, match=r"path: gs://bucket/rows.jsonl: .* needs the package gcsfs"):
        at("gs://bucket/rows.jsonl")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("ftp://host/rows.jsonl", "ftp:// cannot be read; use one of s3://"),
        ("s3://key:secret@bucket/rows.jsonl", "must not contain a user or password"),
        ("https://user@host/rows.jsonl", "must not contain a user or password"),
    ],
)
def test_address_that_cannot_be_read_is_refused_in_the_recipe(address: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataSource(path=address)
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(name=address)


def test_file_without_rows_is_refused_before_anything_is_read(put: Put) -> None:
    put("suffix/rows.bin", b"")
    with pytest.raises(UserError, match=r"rows are read from .*, not from 'rows.bin'"):
        at("s3://bucket/suffix/rows.bin")
    put("suffix/rows.jsonl", lines(ROWS))
    with pytest.raises(UserError, match="`revision` applies only to the Hub"):
        at("s3://bucket/suffix/rows.jsonl", revision="main")


@pytest.mark.parametrize("marks", ["etag", "date", "nothing"])
@pytest.mark.parametrize("ranges", [True, False])
def test_file_of_a_web_server_is_read_and_refused_after_a_change(web: FileServer, marks: str, ranges: bool) -> None:
    web.marks, web.ranges = marks, ranges
    web.files["/data/rows.jsonl"] = lines(ROWS)
    pinned = at(f"{web.url}/data/rows.jsonl")
    assert rows_of(pinned) == ROWS
    assert pinned.content() == at(f"{web.url}/data/rows.jsonl").content()
    web.files["/data/rows.jsonl"] = lines(MORE)
    with pytest.raises(DataError, match="has changed since this run started"):
        read(pinned)
    assert pinned.content() != at(f"{web.url}/data/rows.jsonl").content()


@pytest.mark.parametrize("marks", ["etag", "date", "nothing"])
def test_etags_identify_content_only_within_an_address(web: FileServer, marks: str) -> None:
    web.marks = marks
    web.files["/here/rows.jsonl"] = web.files["/there/rows.jsonl"] = lines(ROWS)
    contents = [at(f"{web.url}/{folder}/rows.jsonl").content() for folder in ("here", "there")]
    assert (contents[0] == contents[1]) == (marks == "nothing")


def test_value_of_a_query_is_not_in_the_key(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/rows.jsonl"] = lines(ROWS)
    contents = []
    for value in ("s3cr3t-one", "s3cr3t-two"):
        monkeypatch.setenv("ROWS_TOKEN", value)
        contents.append(at(f"{web.url}/rows.jsonl?token=env:ROWS_TOKEN").content())
    assert contents[0] == contents[1]


def test_parquet_of_a_web_server_needs_ranges(web: FileServer) -> None:
    web.files["/rows.parquet"] = parquet(ROWS)
    assert rows_of(at(f"{web.url}/rows.parquet")) == ROWS
    web.ranges = False
    with pytest.raises(DataError, match="the server sends it only as a whole; download it"):
        read(at(f"{web.url}/rows.parquet"))


@pytest.mark.parametrize("says_so", [True, False])
def test_files_are_read_whole_from_a_server_without_range_requests(
    web: FileServer, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "BLOCK", 1 << 16)
    web.ranges, web.says_so = False, says_so
    many = [{"prompt": "a" * 1000, "completion": f"{number}"} for number in range(200)]
    web.files["/rows.jsonl"], web.files["/rows.parquet"] = lines(many), parquet(ROWS)
    assert rows_of(at(f"{web.url}/rows.jsonl")) == many
    with pytest.raises(DataError, match="the server sends it only as a whole; download it"):
        read(at(f"{web.url}/rows.parquet"))


def test_body_may_take_longer_than_the_limit_of_the_library(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    web.ranges = False
    web.files["/rows.jsonl"] = lines(ROWS * 50_000)
    pinned = at(f"{web.url}/rows.jsonl")
    web.pause = 1.0
    assert len(rows_of(pinned)) == 100_000


def test_an_interrupted_answer_is_requested_again(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.time, "sleep", lambda seconds: None)
    web.files["/rows.jsonl"] = lines(ROWS * 1000)
    pinned = at(f"{web.url}/rows.jsonl")
    web.broken_off = 2
    assert rows_of(pinned) == ROWS * 1000
    web.broken_off = 1000
    with pytest.raises(Unavailable, match="the server does not answer"):
        read(pinned)


@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (404, UserError, "there is no such file"),
        (403, EnvironmentFault, r"access is denied \(HTTP 403\)"),
        (503, Unavailable, r"the server does not answer \(HTTP 503\)"),
    ],
)
def test_refusal_of_a_web_server_is_one_sentence(
    web: FileServer, status: int, kind: type[Exception], sentence: str
) -> None:
    web.status = status
    with pytest.raises(kind, match=rf"^path: {web.url}/rows.jsonl: {sentence}"):
        at(f"{web.url}/rows.jsonl")


def test_certificate_that_is_not_trusted_is_one_sentence(tmp_path: Path) -> None:
    with (
        file_server(tmp_path) as server,
        pytest.raises(EnvironmentFault, match=r"rows.jsonl: its certificate is not trusted .*; set SSL_CERT_FILE"),
    ):
        at(f"{server.url}/rows.jsonl")


def test_secret_of_a_query_stays_in_the_environment(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS_TOKEN", "s3cr3t-value")
    web.files["/rows.jsonl"] = lines(ROWS)
    pinned = at(f"{web.url}/rows.jsonl?token=env:ROWS_TOKEN")
    assert rows_of(pinned) == ROWS
    assert "s3cr3t-value" not in pinned.model_dump_json()
    assert all(path == "/rows.jsonl?token=s3cr3t-value" for _, path, _ in web.requests)


def test_checks_of_the_first_rows_fetch_only_the_beginning(web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "BLOCK", 1 << 16)
    web.files["/rows.jsonl"] = lines([{"prompt": "a" * 1000, "completion": "b"}] * 10_000)
    assert len(read(at(f"{web.url}/rows.jsonl", rows=3).model_copy(update={"first": 10}))) == 3
    spans = [span.removeprefix("bytes=").split("-") for _, _, span in web.requests if span]
    assert max(int(end) for _, end in spans) < len(web.files["/rows.jsonl"]) // 2


READ = """
import json, sys
from alignment_core.data import kinds
from alignment_core.data.pin import pin
from alignment_core.recipes import DataSource

pinned = pin(DataSource.model_validate(json.loads(sys.argv[1])))
rows = pinned.read(0, 0, kinds.load("demonstrations"))
print(json.dumps({"rows": list(rows), "content": pinned.content()}))
"""


def test_files_of_the_hub_are_read_at_the_commit_that_was_pinned(tmp_path: Path) -> None:
    """In a separate process: the Hub's client reads its settings when imported."""
    server = HubServer(tmp_path / "hub").start()
    try:
        hub = HfApi(endpoint=server.url, token=TOKEN)
        repo = f"{ORGANISATION}/rows"
        hub.create_repo(repo, repo_type="dataset")
        upload: Any = {"repo_id": repo, "repo_type": "dataset"}
        first = hub.upload_file(path_or_fileobj=lines(ROWS), path_in_repo="data/train.jsonl", **upload)
        hub.upload_file(path_or_fileobj=lines(MORE), path_in_repo="data/train.jsonl", **upload)
        hub.upload_file(path_or_fileobj=lines(ROWS), path_in_repo="data/test.jsonl", **upload)

        def read_there(path: str, **fields: Any) -> dict[str, Any]:
            source = json.dumps({"path": path, **fields})
            environment = {**os.environ, **server.environment(), "HF_HOME": str(tmp_path / "home")}
            done = subprocess.run(
                [sys.executable, "-c", READ, source], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer

        now = read_there(f"hf://datasets/{repo}/data/*.jsonl")
        assert now["rows"] == [
            ["test.jsonl:1", ROWS[0]],
            ["test.jsonl:2", ROWS[1]],
            ["train.jsonl:1", MORE[0]],
        ]
        before = read_there(f"hf://datasets/{repo}@{first.oid}/data/train.jsonl")
        assert [row for _, row in before["rows"]] == ROWS
        assert read_there(f"hf://datasets/{repo}/data/train.jsonl", revision=first.oid) == before
        assert [row for _, row in read_there(f"hf://datasets/{repo}/data", split="test")["rows"]] == ROWS
    finally:
        server.end()


def test_address_of_a_whole_repository_is_its_name_on_the_hub() -> None:
    assert DataSource(path="hf://datasets/a/b").path == "a/b"
    assert ModelConfig(name="hf://a/b").name == "a/b"


@pytest.mark.parametrize("revision", ["main", "refs/convert/parquet", "refs/pr/3"])
def test_revision_in_an_address_of_the_hub_may_have_slashes(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(addresses, "commit_of", lambda *given: requests.append(given) or "c" * 40)
    address = f"hf://datasets/org/rows@{revision}/data/train.jsonl"
    pinned = addresses._at_commit(address, None)
    assert (pinned, requests) == (
        f"hf://datasets/org/rows@{'c' * 40}/data/train.jsonl",
        [("org/rows", revision, "dataset")],
    )
    assert addresses.is_same(address, addresses.RemoteFile(address=pinned, version="blob"))
