"""Requests to an S3 server about the objects of a store: one client per process, conditional writes, reads that resume."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from alignment_core.artifacts.paths import inside
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
    translate_errors,
)
from alignment_core.errors import Unavailable

if TYPE_CHECKING:
    from botocore.client import BaseClient

_IN_MEMORY = 8  # parts of all objects that are being sent
_CHUNK = 1 << 20
_NO_BYTES = {"InvalidRange", "416"}  # answers to a range of an empty object


class S3Requests:
    """Objects are those of ``bucket`` whose keys begin with ``prefix``, which is empty or ends in '/'."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._connection: Connection | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def client(self) -> BaseClient:
        return self.connection().client

    def connection(self) -> Connection:
        """The connection of this process: a forked child must not use its parent's sockets and locks."""
        connection = self._connection
        if connection is None or connection.process != os.getpid():
            with _guard:
                connection = self._connection
                if connection is None or connection.process != os.getpid():
                    connection = Connection(os.getpid(), new_client(), threading.BoundedSemaphore(_IN_MEMORY))
                    self._connection = connection
        return connection

    def translate_errors(self, action: str, path: str) -> AbstractContextManager[None]:
        return translate_errors(action, self.uri, path)

    def key(self, path: str) -> str:
        return self.prefix + inside(self.uri, path)

    def head(self, path: str) -> dict[str, Any] | None:
        try:
            return dict(self.client.head_object(Bucket=self.bucket, Key=self.key(path)))
        except ClientError as error:
            if code_of(error) in ABSENT:
                return None
            raise

    def get(self, path: str, start: int, end: int | None, version: str | None) -> dict[str, Any]:
        """Request the bytes from ``start`` to ``end`` (None: all) of one version. The body is still to be read."""
        request = {"Bucket": self.bucket, "Key": self.key(path)}
        if end is not None:
            request["Range"] = f"bytes={start}-{end - 1}"
        if version is not None:
            request["IfMatch"] = version
        try:
            return dict(self.client.get_object(**request))
        except ClientError as error:
            if code_of(error) in _NO_BYTES and start == 0:
                return self.get(path, 0, None, version)
            raise

    def pieces(self, path: str, start: int, end: int, version: str, answer: dict[str, Any] | None) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` of one version, from an ``answer`` that has begun or a new one.

        A connection that breaks off is replaced by a request for the rest. Raises Unavailable when several
        such requests in a row bring no bytes.
        """
        broken = 0
        while start < end:
            answer = answer or self.get(path, start, end, version)
            began = start
            with suppress(*BROKEN_OFF):
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    yield chunk
                    start += len(chunk)
            if start < end:
                broken = broken + 1 if start == began else 0
                if broken == ATTEMPTS:
                    raise Unavailable(f"cannot read {self.uri}/{path}: the answers end at byte {start} of {end}")
                pause_before(broken)
            answer = None

    def put_if(self, call: str, path: str, request: dict[str, Any], replaces: str | None, identity: str) -> str | None:
        """Make a call that creates or replaces an object; its new version, or None when the condition does not hold.

        An answer may be lost after the server has done the work, and then the retry finds its own object in the way. So the
        object that is there is compared with ``identity``: the ETag of a large object, or the writer in a small one's metadata.
        """
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        for attempt in range(ATTEMPTS):
            try:
                return str(getattr(self.client, call)(Bucket=self.bucket, **request, **condition)["ETag"])
            except (ClientError, BotoCoreError) as error:
                code = code_of(error)
                if code in AGAIN and attempt + 1 < ATTEMPTS:  # it collided with another conditional write
                    pause_before(attempt)
                    continue
                if code in ABSENT and replaces is not None:
                    return None
                if code not in LOST | NO_UPLOAD and isinstance(error, ClientError) and status_of(error) < 500:
                    raise
                head = self.head(path)
                if head is not None and identity in (head["ETag"], head.get("Metadata", {}).get("writer")):
                    return str(head["ETag"])
                if code in LOST:
                    return None
                raise
        raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class Connection:
    """Client and locks of one process."""

    process: int
    client: BaseClient
    parts: threading.BoundedSemaphore
    """Acquired for each part in memory."""


_guard = threading.Lock()


def _new_guard() -> None:
    """A child that was forked while another thread held the guard would wait for it forever."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_new_guard)


def pause_before(attempt: int) -> None:
    """Jittered exponential backoff, so that writers that collided once do not collide again at the next attempt."""
    time.sleep(random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**attempt))
