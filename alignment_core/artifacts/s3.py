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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.os_errors import check_room, explained
from alignment_core.artifacts.paths import check_path
from alignment_core.artifacts.s3_client import (
    ABSENT,
    AGAIN,
    ATTEMPTS,
    BROKEN_OFF,
    LOST,
    NO_UPLOAD,
    code_of,
    new_client,
    status_of,
    told,
)
from alignment_core.errors import StoreError, Unavailable

if TYPE_CHECKING:
    from botocore.client import BaseClient

PART = 16 << 20
"""Bytes of a part of a large object; at most so many are sent again by each thread after an upload was killed."""
_PARTS = 10_000  # that S3 allows for one object
_THREADS = 4  # of one large object; the publisher works on several objects at once
_IN_MEMORY = 8  # parts of all the objects that are being sent, at once
_REFUSED = (400, 405, 501)  # statuses of what a server does not know, among others
_UNASKED = 1 << 16
"""Bytes that are sent without a look whether they are there: the look would cost more."""
_CHUNK = 1 << 20
_NO_BYTES = {"InvalidRange", "416"}  # in an empty object

T = TypeVar("T")


class S3Backend:
    """Objects are those of ``bucket`` whose keys begin with ``prefix``, which is empty or ends in '/'."""

    few_writes = False

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._made: _Connection | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def endpoint(self) -> str:
        return str(self._client.meta.endpoint_url)

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        if isinstance(source, Path):
            with explained("read", source):
                size = source.stat().st_size
            if size > PART:
                return self._put_large(path, source, size, replaces)
            if size > _UNASKED and replaces is None and self.stat(path) is not None:
                return None  # before it is sent in vain
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
            answer = self._get(path, 0, None, None)
            yield from self._pieces(path, 0, int(answer["ContentLength"]), answer["ETag"], answer)

    def download(self, path: str, destination: Path) -> None:
        with explained("write", destination), self._told("read", path):
            first = self._get(path, 0, PART, None)
            size = _whole_size(first)
            check_room(destination.parent, size, destination.name)
            file = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.truncate(file, size)

                def fetch(start: int) -> None:
                    at, answer = start, None if start else first
                    for chunk in self._pieces(path, start, min(start + PART, size), first["ETag"], answer):
                        at += os.pwrite(file, chunk, at)

                _all_of(fetch, range(0, size, PART))
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

    def delete(self, path: str, version: str | None = None) -> None:
        """Some servers know no condition for it: those delete whichever version there is."""
        condition = {} if version is None else {"IfMatch": version}
        with self._told("delete", path):
            for attempt in range(ATTEMPTS):
                try:
                    self._client.delete_object(Bucket=self.bucket, Key=self._key(path), **condition)
                except ClientError as error:
                    code = code_of(error)
                    if code in AGAIN and attempt + 1 < ATTEMPTS:
                        _pause(attempt)
                        continue
                    if condition and status_of(error) in _REFUSED:
                        self.delete(path)
                    elif code not in ABSENT | LOST:
                        raise
                return

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
                if code_of(error) not in NO_UPLOAD:
                    raise

    # ---------------------------------------------------------------- inside

    def _put_large(self, path: str, source: Path, size: int, replaces: str | None) -> str | None:
        """Send a file in parts, again if the upload is gone: somebody ended or dropped it, or the server forgot it."""
        with self._told("write", path):
            for attempt in range(ATTEMPTS):
                if replaces is None and self._head(path) is not None:
                    return None  # before all of it is sent in vain
                try:
                    return self._put_parts(path, source, size, replaces)
                except ClientError as error:
                    if code_of(error) not in NO_UPLOAD or attempt + 1 == ATTEMPTS:
                        raise
        raise AssertionError("the last try returns or raises")

    def _put_parts(self, path: str, source: Path, size: int, replaces: str | None) -> str | None:
        """Send a large file in parts, several at a time. Parts that an earlier upload of the path left are not sent again, if
        they have the same bytes."""
        key = self._key(path)
        length = max(PART, -(-size // _PARTS))
        with explained("read", source), source.open("rb") as file:
            upload, there = self._upload(path)

            def send(start: int) -> dict[str, Any]:
                with self._connection.parts:
                    data, number = os.pread(file.fileno(), length, start), start // length + 1
                    checksum = _checksum(data)
                    part = {"PartNumber": number, "ChecksumSHA256": checksum}
                    if (kept := there.get(number)) and _has(kept, data, checksum):
                        return part | {"ETag": kept["ETag"]}
                    answer = self._client.upload_part(Bucket=self.bucket, Key=key, UploadId=upload, Body=data, **part)
                    return part | {"ETag": answer["ETag"]}

            parts = _all_of(send, range(0, size, length))
        request = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        return self._conditionally("complete_multipart_upload", path, request, replaces, _etag_of(parts))

    def _upload(self, path: str) -> tuple[str, dict[int, dict[str, Any]]]:
        """An upload of a path and the parts that it has: the youngest that was begun and did not end, or a new one."""
        key = self._key(path)
        begun = [upload for upload in self._uploads(key) if upload.path == path]
        if begun:
            upload = max(begun, key=lambda one: one.modified).version
            pages = self._client.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload)
            return upload, {part["PartNumber"]: part for page in pages for part in page.get("Parts", ())}
        answer = self._client.create_multipart_upload(Bucket=self.bucket, Key=key, ChecksumAlgorithm="SHA256")
        return answer["UploadId"], {}

    def _uploads(self, prefix: str) -> Iterator[Object]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
        for upload in (upload for page in pages for upload in page.get("Uploads", ())):
            path = upload["Key"].removeprefix(self.prefix)
            yield Object(path, 0, upload["Initiated"].timestamp(), upload["UploadId"])

    def _conditionally(
        self, call: str, path: str, request: dict[str, Any], replaces: str | None, mine: str
    ) -> str | None:
        """Make a call that puts an object on a condition. ``mine`` is the ETag of a large object or the writer of a small one:
        what tells, when an answer was lost or says that the condition does not hold, whether an earlier try succeeded."""
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        for attempt in range(ATTEMPTS):
            try:
                return str(getattr(self._client, call)(Bucket=self.bucket, **request, **condition)["ETag"])
            except (ClientError, BotoCoreError) as error:
                code = code_of(error)
                if code in AGAIN and attempt + 1 < ATTEMPTS:
                    _pause(attempt)
                    continue
                if code in ABSENT and replaces is not None:
                    return None
                if code not in LOST | NO_UPLOAD and isinstance(error, ClientError) and status_of(error) < 500:
                    raise
                found = self._head(path)
                if found is not None and mine in (found["ETag"], found.get("Metadata", {}).get("writer")):
                    return str(found["ETag"])
                if code in LOST:
                    return None
                raise
        raise AssertionError("the last try returns or raises")

    def _get(self, path: str, start: int, end: int | None, version: str | None) -> dict[str, Any]:
        """Ask for the bytes from ``start`` to ``end`` (None: all) of one version. The body is still to be read."""
        request = {"Bucket": self.bucket, "Key": self._key(path)}
        if end is not None:
            request["Range"] = f"bytes={start}-{end - 1}"
        if version is not None:
            request["IfMatch"] = version
        try:
            return dict(self._client.get_object(**request))
        except ClientError as error:
            if code_of(error) in _NO_BYTES and start == 0:
                return self._get(path, 0, None, version)
            raise

    def _pieces(self, path: str, start: int, end: int, version: str, answer: dict[str, Any] | None) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` of one version, from an ``answer`` that has begun or a new one; what breaks off
        is taken up where it was."""
        broken = 0
        while start < end:
            answer = answer or self._get(path, start, end, version)
            began = start
            with suppress(*BROKEN_OFF):
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    yield chunk
                    start += len(chunk)
            if start < end:
                broken = broken + 1 if start == began else 0
                if broken == ATTEMPTS:
                    raise Unavailable(f"cannot read {self.uri}/{path}: the answers end at byte {start} of {end}")
                _pause(broken)
            answer = None

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            return dict(self._client.head_object(Bucket=self.bucket, Key=self._key(path)))
        except ClientError as error:
            if code_of(error) in ABSENT:
                return None
            raise

    def _key(self, path: str) -> str:
        try:
            return self.prefix + check_path(path)
        except ValueError as error:
            raise StoreError(f"the store at {self.uri} refuses the path: {error}") from error

    @property
    def _client(self) -> BaseClient:
        return self._connection.client

    @property
    def _connection(self) -> _Connection:
        made = self._made
        if made is None or made.process != os.getpid():
            with _guard:
                made = self._made
                if made is None or made.process != os.getpid():
                    made = self._made = _Connection(os.getpid(), new_client(), threading.BoundedSemaphore(_IN_MEMORY))
        return made

    def _told(self, action: str, path: str) -> AbstractContextManager[None]:
        return told(action, self.uri, path)


@dataclass(frozen=True)
class _Connection:
    """What belongs to one process, for a fork must share neither connections nor locks."""

    process: int
    client: BaseClient
    parts: threading.BoundedSemaphore
    """Held by whoever has a part in memory."""


_guard = threading.Lock()


def _new_guard() -> None:
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_new_guard)


def _pause(attempt: int) -> None:
    time.sleep(random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**attempt))


def _whole_size(answer: dict[str, Any]) -> int:
    """Of the object, whichever bytes of it an answer brings."""
    return int(answer["ContentRange"].rpartition("/")[2] if "ContentRange" in answer else answer["ContentLength"])


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


def _all_of(work: Callable[[int], T], items: Sequence[int]) -> list[T]:
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))
