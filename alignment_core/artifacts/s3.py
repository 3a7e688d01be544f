"""The S3 backend: a store below a prefix of a bucket of any server with S3's conditional writes.

Credentials, region and endpoint are those of the AWS tools (``AWS_*``, ``~/.aws``, the machine's role), never part of a URI.
Uploads carry their SHA-256, which the server checks; downloads are checked by ``Blobs``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from alignment_core.artifacts import downloads, s3_requests
from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.s3_client import ABSENT, AGAIN, ATTEMPTS, LOST, code_of, status_of
from alignment_core.artifacts.s3_requests import S3Requests
from alignment_core.artifacts.s3_uploads import S3Uploads, checksum_of

_REFUSED = (400, 405, 501)  # statuses of requests with a condition that the server does not know, among others
_UNCHECKED = 1 << 16
"""Objects up to this size are uploaded without an existence check, which would cost more."""


class S3Backend:
    """Objects are those of ``bucket`` whose keys begin with ``prefix``, which is empty or ends in '/'."""

    few_writes = False

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.requests = S3Requests(bucket, prefix)
        self.uploads = S3Uploads(self.requests)

    @property
    def uri(self) -> str:
        return self.requests.uri

    @property
    def endpoint(self) -> str:
        return str(self.requests.client.meta.endpoint_url)

    def put(self, path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        if isinstance(source, Path):
            with explained("read", source):
                size = source.stat().st_size
            if size > downloads.PART:
                return self.uploads.put(path, source, size, replaces)
            if size > _UNCHECKED and replaces is None and self.stat(path) is not None:
                return None
            with explained("read", source):
                source = source.read_bytes()
        writer = uuid.uuid4().hex
        request = {
            "Key": self.requests.key(path),
            "Body": source,
            "Metadata": {"writer": writer},
            "ChecksumSHA256": checksum_of(source),
        }
        with self.requests.translate_errors("write", path):
            return self.requests.put_if("put_object", path, request, replaces, writer)

    def read(self, path: str) -> bytes:
        return b"".join(self.stream(path))

    def stream(self, path: str) -> Iterator[bytes]:
        with self.requests.translate_errors("read", path):
            answer = self.requests.get(path, 0, None, None)
            yield from self.requests.pieces(path, 0, int(answer["ContentLength"]), answer["ETag"], answer)

    def download(self, path: str, destination: Path) -> None:
        with self.requests.translate_errors("read", path):
            first = self.requests.get(path, 0, downloads.PART, None)

            def pieces(start: int, end: int) -> Iterator[bytes]:
                # Of one version: the object may be replaced while its parts are on their way.
                return self.requests.pieces(path, start, end, first["ETag"], None if start else first)

            downloads.download_parts(destination, _whole_size(first), pieces)

    def stat(self, path: str) -> Object | None:
        with self.requests.translate_errors("look at", path):
            head = self.requests.head(path)
        if head is None:
            return None
        return Object(path, head["ContentLength"], head["LastModified"].timestamp(), head["ETag"])

    def list(self, prefix: str) -> Iterator[Object]:
        below = f"{self.requests.key(prefix.removesuffix('/'))}/" if prefix else self.prefix
        with self.requests.translate_errors("list", prefix):
            pages = self.requests.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below)
            for entry in (entry for page in pages for entry in page.get("Contents", ())):
                path = entry["Key"].removeprefix(self.prefix)
                yield Object(path, entry["Size"], entry["LastModified"].timestamp(), entry["ETag"])

    def delete(self, path: str, version: str | None = None) -> None:
        """Servers without conditional deletion delete any version."""
        condition = {} if version is None else {"IfMatch": version}
        with self.requests.translate_errors("delete", path):
            for attempt in range(ATTEMPTS):
                try:
                    self.requests.client.delete_object(Bucket=self.bucket, Key=self.requests.key(path), **condition)
                except ClientError as error:
                    code = code_of(error)
                    if code in AGAIN and attempt + 1 < ATTEMPTS:
                        s3_requests.pause_before(attempt)
                        continue
                    # Not every S3 server knows conditional deletion.
                    if condition and status_of(error) in _REFUSED:
                        self.delete(path)
                    elif code not in ABSENT | LOST:
                        raise
                return

    def now(self) -> float:
        """The Date of an HTTP response: whole seconds, as in the times of objects."""
        with self.requests.translate_errors("ask for the time of", ""):
            answer = self.requests.client.list_objects_v2(
                Bucket=self.bucket, Prefix=f"{self.prefix}format.json", MaxKeys=1
            )
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def unfinished(self) -> Iterator[Object]:
        return self.uploads.unfinished()

    def drop(self, upload: Object) -> None:
        self.uploads.drop(upload)


def _whole_size(answer: dict[str, Any]) -> int:
    """Size of the whole object, of which the answer may bring a range."""
    return int(answer["ContentRange"].rpartition("/")[2] if "ContentRange" in answer else answer["ContentLength"])
