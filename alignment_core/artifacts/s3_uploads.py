"""Uploads of large objects in parts to an S3 server, which continue a killed upload."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from alignment_core.artifacts import downloads
from alignment_core.artifacts.backend import Object
from alignment_core.artifacts.os_errors import explained
from alignment_core.artifacts.s3_client import ATTEMPTS, NO_UPLOAD, code_of
from alignment_core.artifacts.s3_requests import S3Requests

_PARTS = 10_000  # S3's limit for one object


class S3Uploads:
    """Uploads that have begun, by this process or others, and have not become objects yet."""

    def __init__(self, requests: S3Requests) -> None:
        self.requests = requests

    def put(self, path: str, source: Path, size: int, replaces: str | None) -> str | None:
        """Send a file in parts; again if the upload was completed or aborted meanwhile. See :meth:`Backend.put`."""
        with self.requests.translate_errors("write", path):
            for attempt in range(ATTEMPTS):
                if replaces is None and self.requests.head(path) is not None:
                    return None  # checked before gigabytes are sent
                try:
                    return self._put_parts(path, source, size, replaces)
                except ClientError as error:
                    if code_of(error) not in NO_UPLOAD or attempt + 1 == ATTEMPTS:
                        raise
        raise AssertionError("the last try returns or raises")

    def _put_parts(self, path: str, source: Path, size: int, replaces: str | None) -> str | None:
        """Send parts, several at a time; parts that a killed upload left are not sent again if their bytes are equal."""
        key = self.requests.key(path)
        length = max(downloads.PART, -(-size // _PARTS))
        with explained("read", source), source.open("rb") as file:
            upload, uploaded = self._upload(path)

            def send(start: int) -> dict[str, Any]:
                with self.requests.connection().parts:
                    data, number = os.pread(file.fileno(), length, start), start // length + 1
                    checksum = checksum_of(data)
                    part = {"PartNumber": number, "ChecksumSHA256": checksum}
                    if (existing := uploaded.get(number)) and _has(existing, data, checksum):
                        return part | {"ETag": existing["ETag"]}
                    answer = self.requests.client.upload_part(
                        Bucket=self.requests.bucket, Key=key, UploadId=upload, Body=data, **part
                    )
                    return part | {"ETag": answer["ETag"]}

            parts = downloads.in_threads(send, range(0, size, length))
        request = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        return self.requests.put_if("complete_multipart_upload", path, request, replaces, _etag_of(parts))

    def _upload(self, path: str) -> tuple[str, dict[int, dict[str, Any]]]:
        """Id and parts of an upload of a path: the youngest unfinished one, or a new one."""
        key = self.requests.key(path)
        begun = [upload for upload in self._list(key) if upload.path == path]
        if begun:
            upload = max(begun, key=lambda unfinished: unfinished.modified).version
            pages = self.requests.client.get_paginator("list_parts").paginate(
                Bucket=self.requests.bucket, Key=key, UploadId=upload
            )
            return upload, {part["PartNumber"]: part for page in pages for part in page.get("Parts", ())}
        answer = self.requests.client.create_multipart_upload(
            Bucket=self.requests.bucket, Key=key, ChecksumAlgorithm="SHA256"
        )
        return answer["UploadId"], {}

    def unfinished(self) -> Iterator[Object]:
        """All unfinished uploads of the store; an upload's ``version`` is its id."""
        with self.requests.translate_errors("list the uploads of", ""):
            yield from self._list(self.requests.prefix)

    def drop(self, upload: Object) -> None:
        """Abort an upload; one that has ended is no error."""
        with self.requests.translate_errors("give up the upload of", upload.path):
            try:
                self.requests.client.abort_multipart_upload(
                    Bucket=self.requests.bucket, Key=self.requests.key(upload.path), UploadId=upload.version
                )
            except ClientError as error:
                if code_of(error) not in NO_UPLOAD:
                    raise

    def _list(self, prefix: str) -> Iterator[Object]:
        pages = self.requests.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.requests.bucket, Prefix=prefix
        )
        for upload in (upload for page in pages for upload in page.get("Uploads", ())):
            path = upload["Key"].removeprefix(self.requests.prefix)
            yield Object(path, 0, upload["Initiated"].timestamp(), upload["UploadId"])


def checksum_of(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _has(part: dict[str, Any], data: bytes, checksum: str) -> bool:
    """Whether a part on the server has these bytes, by its SHA-256 or, on servers that keep none, its MD5."""
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
