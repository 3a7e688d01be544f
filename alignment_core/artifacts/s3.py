"""The S3 backend: a store below a prefix of a bucket, whichever server keeps it, by S3's conditional writes.

Credentials, region and endpoint come from where the AWS tools look for them (``AWS_*``, ``~/.aws``, the machine's role),
never from a URI. What is sent carries its SHA-256, which the server checks; what comes back is checked by ``Content``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.faults import check_room, explained
from alignment_core.artifacts.paths import check_path
from alignment_core.errors import EnvironmentFault, InfrastructureError, NotFound, StoreError

if TYPE_CHECKING:
    from botocore.client import BaseClient

PART = 16 << 20
"""Bytes of a part of a large object; at most so many are sent again by each thread after an upload was killed."""
_PARTS = 10_000  # that S3 allows for one object
_THREADS = 4  # of one large object; the publisher works on several objects at once
_CHUNK = 1 << 20
_CONNECTIONS = 64
_ATTEMPTS = 8

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_LOST = {"PreconditionFailed", "412"}
_AGAIN = {"ConditionalRequestConflict", "409", "OperationAborted"}
_NO_UPLOAD = {"NoSuchUpload"}
_BROKEN = (ConnectionError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
_DENIED = {
    "AccessDenied": "these credentials may not do this; ask for the right to read, write, list and delete below the prefix",
    "403": "access is denied; are the credentials those of this bucket?",
    "InvalidAccessKeyId": "the server does not know the access key; check AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; check AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "the credentials have expired; renew them",
    "NoSuchBucket": "there is no such bucket; create it first",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
    "QuotaExceeded": "the quota of the bucket is used up; free space (`align artifacts gc`) or raise it",
    "XMinioStorageFull": "the server's disk is full; free space (`align artifacts gc`)",
    "507": "the server's disk is full; free space (`align artifacts gc`)",
}

T = TypeVar("T")


class S3Backend:
    """Objects are those of ``bucket`` whose keys begin with ``prefix``, which is empty or ends in '/'."""

    few_writes = False

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._made: tuple[int, BaseClient] | None = None  # by which process, for a fork must not share connections

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        if isinstance(source, Path):
            with explained("read", source):
                size = source.stat().st_size
            if replaces is None and self.stat(path) is not None:
                return None  # before all of it is sent in vain
            if size > PART:
                return self._put_parts(path, source, size, replaces)
            with explained("read", source):
                source = source.read_bytes()
        writer = uuid.uuid4().hex
        request = {
            "Key": self._key(path),
            "Body": source,
            "Metadata": {"writer": writer},
            "ChecksumSHA256": _checksum(source),
        }
        with self._told("write", path):
            return self._conditionally("put_object", path, request, replaces, writer)

    def read(self, path: str) -> bytes:
        return b"".join(self.stream(path))

    def stream(self, path: str) -> Iterator[bytes]:
        with self._told("read", path):
            yield from self._pieces(path, 0, None, None)

    def download(self, path: str, destination: Path) -> None:
        found = self.stat(path)
        if found is None:
            raise NotFound(f"{self.uri} has no {path}")
        check_room(destination.parent, found.size, destination.name)
        with explained("write", destination), self._told("read", path):
            file = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.truncate(file, found.size)

                def fetch(start: int) -> None:
                    end, at = min(start + PART, found.size), start
                    for chunk in self._pieces(path, start, end, found.version):
                        at += os.pwrite(file, chunk, at)

                _all_of(fetch, range(0, found.size, PART))
                os.fchmod(file, 0o444)
            finally:
                os.close(file)

    def stat(self, path: str) -> Object | None:
        with self._told("look at", path):
            found = self._head(path)
        return (
            None
            if found is None
            else Object(path, found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])
        )

    def list(self, prefix: str) -> Iterator[Object]:
        below = f"{self._key(prefix.removesuffix('/'))}/" if prefix else self.prefix
        with self._told("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below)
            for found in (found for page in pages for found in page.get("Contents", ())):
                path = found["Key"].removeprefix(self.prefix)
                yield Object(path, found["Size"], found["LastModified"].timestamp(), found["ETag"])

    def delete(self, path: str) -> None:
        with self._told("delete", path):
            self._client.delete_object(Bucket=self.bucket, Key=self._key(path))

    def now(self) -> float:
        """The time of an answer, as HTTP tells it: whole seconds, as those of objects are."""
        with self._told("ask for the time of", ""):
            answer = self._client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}format.json", MaxKeys=1)
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def unfinished(self) -> Iterator[Object]:
        with self._told("list the uploads of", ""):
            yield from self._uploads(self.prefix)

    def drop(self, upload: Object) -> None:
        with self._told("give up the upload of", upload.path):
            try:
                self._client.abort_multipart_upload(
                    Bucket=self.bucket, Key=self._key(upload.path), UploadId=upload.version
                )
            except ClientError as error:
                if _code(error) not in _NO_UPLOAD:
                    raise

    # ---------------------------------------------------------------- inside

    def _put_parts(self, path: str, source: Path, size: int, replaces: str | None) -> str | None:
        """Send a large file in parts, several at a time. Parts that an earlier upload of the path left are not sent again, if
        they have the same bytes."""
        key = self._key(path)
        length = max(PART, -(-size // _PARTS))
        with self._told("write", path), source.open("rb") as file:
            begun = [upload for upload in self._uploads(key) if upload.path == path]
            if begun:
                upload = max(begun, key=lambda one: one.modified).version
            else:
                answer = self._client.create_multipart_upload(Bucket=self.bucket, Key=key, ChecksumAlgorithm="SHA256")
                upload = answer["UploadId"]
            there = self._parts(key, upload)

            def send(start: int) -> dict[str, Any]:
                data, number = os.pread(file.fileno(), length, start), start // length + 1
                checksum = _checksum(data)
                part = {"PartNumber": number, "ChecksumSHA256": checksum}
                if (kept := there.get(number)) and _has(kept, data, checksum):
                    return part | {"ETag": kept["ETag"]}
                answer = self._client.upload_part(Bucket=self.bucket, Key=key, UploadId=upload, Body=data, **part)
                return part | {"ETag": answer["ETag"]}

            try:
                parts = _all_of(send, range(0, size, length))
                request = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
                return self._conditionally("complete_multipart_upload", path, request, replaces, _etag_of(parts))
            except ClientError as error:
                if _code(error) not in _NO_UPLOAD:
                    raise
                return None  # another publisher of the same bytes ended it

    def _uploads(self, prefix: str) -> Iterator[Object]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
        for upload in (upload for page in pages for upload in page.get("Uploads", ())):
            path = upload["Key"].removeprefix(self.prefix)
            yield Object(path, 0, upload["Initiated"].timestamp(), upload["UploadId"])

    def _parts(self, key: str, upload: str) -> dict[int, dict[str, Any]]:
        pages = self._client.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload)
        return {part["PartNumber"]: part for page in pages for part in page.get("Parts", ())}

    def _conditionally(
        self, call: str, path: str, request: dict[str, Any], replaces: str | None, mine: str
    ) -> str | None:
        """Make a call that puts an object on a condition. ``mine`` is the ETag of a large object or the writer of a small one:
        what tells, when an answer was lost or says that the condition does not hold, whether an earlier try succeeded."""
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        for attempt in range(_ATTEMPTS):
            try:
                return str(getattr(self._client, call)(Bucket=self.bucket, **request, **condition)["ETag"])
            except (ClientError, BotoCoreError) as error:
                code = _code(error)
                if code in _AGAIN and attempt + 1 < _ATTEMPTS:
                    time.sleep(random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**attempt))
                    continue
                if code in _ABSENT and replaces is not None:
                    return None
                if code not in _LOST | _NO_UPLOAD and isinstance(error, ClientError) and _status(error) < 500:
                    raise
                found = self._head(path)
                if found is not None and mine in (found["ETag"], found.get("Metadata", {}).get("writer")):
                    return str(found["ETag"])
                if code in _LOST:
                    return None
                raise
        raise AssertionError("the last try returns or raises")

    def _pieces(self, path: str, start: int, end: int | None, version: str | None) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` (None: to the end) of one version; what breaks off is taken up where it was."""
        broken = 0
        while end is None or start < end:
            request = {"Bucket": self.bucket, "Key": self._key(path)}
            if start or end is not None:
                request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
            if version is not None:
                request["IfMatch"] = version
            try:
                answer = self._client.get_object(**request)
                version, end = answer["ETag"], start + answer["ContentLength"]
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    yield chunk
                    start, broken = start + len(chunk), 0
            except _BROKEN:
                broken += 1
                if broken == _ATTEMPTS:
                    raise

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            return dict(self._client.head_object(Bucket=self.bucket, Key=self._key(path)))
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise

    def _key(self, path: str) -> str:
        try:
            return self.prefix + check_path(path)
        except ValueError as error:
            raise StoreError(f"the store at {self.uri} refuses the path: {error}") from error

    @property
    def _client(self) -> BaseClient:
        if self._made is None or self._made[0] != os.getpid():
            with _guard:
                self._made = os.getpid(), _client()
        return self._made[1]

    @contextmanager
    def _told(self, action: str, path: str) -> Iterator[None]:
        """Turn what botocore raises into a NotFound, EnvironmentFault, InfrastructureError or StoreError."""
        sentence = f"cannot {action} {self.uri}/{path}".rstrip("/")
        try:
            yield
        except ClientError as error:
            code, status = _code(error), _status(error)
            said = error.response["Error"].get("Message", "") or code
            if code in _DENIED or status in (401, 403):
                raise EnvironmentFault(f"{sentence}: {_DENIED.get(code, said)}") from error
            if code in _ABSENT:
                raise NotFound(f"{self.uri} has no {path}") from error
            if status >= 500 or status == 429 or code in _LOST | _AGAIN | _NO_UPLOAD:
                raise InfrastructureError(f"{sentence}: {code}, {said}") from error
            raise StoreError(f"{sentence}: {code}, {said}") from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise EnvironmentFault(
                f"{sentence}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give "
                "this machine a role"
            ) from error
        except (*_BROKEN, HTTPClientError) as error:
            raise InfrastructureError(f"{sentence}: the server does not answer ({error})") from error
        except BotoCoreError as error:
            raise EnvironmentFault(f"{sentence}: {error}") from error


_guard = threading.Lock()


def _new_guard() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_new_guard)


def _client() -> BaseClient:
    session = botocore.session.get_session()
    own = session.get_scoped_config().get("s3") or {}
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        connect_timeout=10,
        read_timeout=60,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",  # ours are SHA-256
        response_checksum_validation="when_required",  # whole files are verified
    )
    region = session.get_config_variable("region") or "us-east-1"
    client = session.create_client("s3", region_name=region, config=config)
    if "addressing_style" in own or urlsplit(client.meta.endpoint_url).netloc.endswith(
        ("amazonaws.com", "amazonaws.com.cn")
    ):
        return client
    # Other servers rarely have a name for each bucket.
    return session.create_client("s3", region_name=region, config=config.merge(Config(s3={"addressing_style": "path"})))


def _code(error: Exception) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _has(part: dict[str, Any], data: bytes, checksum: str) -> bool:
    """Whether a part that lies on the server has these bytes, by the best that the server tells of it."""
    if part["Size"] != len(data):
        return False
    if "ChecksumSHA256" in part:
        return bool(part["ChecksumSHA256"] == checksum)
    return bool(part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest())


def _etag_of(parts: list[dict[str, Any]]) -> str:
    """The ETag that S3 gives to an object of these parts."""
    try:
        digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    except ValueError:
        return ""  # a server with ETags of another kind
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


def _all_of(work: Callable[[int], T], items: Iterable[int]) -> list[T]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))
