"""One side of the campaign ``throughput``: sends a folder to S3 and fetches it, and prints the seconds of both."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def through_store(source: Path, to: Path, prefix: str) -> tuple[Callable[[], object], Callable[[], object]]:
    from alignment_core.artifacts import Store, open_store
    from alignment_core.artifacts.workspace import Workspace

    store = Store(open_store(f"s3://bucket/{prefix}").backend, Workspace(to))
    references = []
    return lambda: references.append(store.publish(source, "model")), lambda: store.fetch(references[0])


def through_call_s3(source: Path, to: Path, prefix: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """The store, whose requests of objects are sent by s3fs instead of its own client."""
    from alignment_core.artifacts import s3_requests

    own = s3_requests.new_client
    s3_requests.new_client = lambda: CallS3(own())  # type: ignore[assignment,return-value]
    return through_store(source, to, prefix)


class CallS3:
    """Looks like botocore's client. Listings, which the campaign has few of, stay with ``own``."""

    def __init__(self, own: Any) -> None:
        from s3fs import S3FileSystem

        self._own, self._files = own, S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        self.meta, self.get_paginator = own.meta, own.get_paginator

    def __getattr__(self, method: str) -> Callable[..., dict[str, Any]]:
        def call(**arguments: Any) -> dict[str, Any]:
            try:
                answer: dict[str, Any] = self._files.call_s3(method, **arguments)
            except OSError as error:
                raise error.__cause__ or error from None
            return answer | ({"Body": Body(self._files.loop, answer["Body"])} if "Body" in answer else {})

        return call


class Body:
    """Reads the body of an answer from a thread, as it comes."""

    def __init__(self, loop: Any, body: Any) -> None:
        self._loop, self._body = loop, body

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        from fsspec.asyn import sync

        while chunk := sync(self._loop, self._body.read, size):
            yield chunk


def through_s3fs(source: Path, to: Path, prefix: str) -> tuple[Callable[[], object], Callable[[], object]]:
    from s3fs import S3FileSystem

    files = S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    files.exists(f"bucket/{prefix}")  # connects
    return (
        lambda: files.put(f"{source}/", f"bucket/{prefix}/", recursive=True),
        lambda: files.get(f"bucket/{prefix}/", f"{to}/", recursive=True),
    )


def main() -> None:
    side, source, to, prefix = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    through = {"store": through_store, "call_s3": through_call_s3, "s3fs": through_s3fs}
    works = through[side](source, to, prefix)
    seconds = {}
    for direction, work in zip(("publish", "fetch"), works, strict=True):
        began = time.perf_counter()
        work()
        seconds[direction] = time.perf_counter() - began
    sizes = sorted(file.stat().st_size for file in source.rglob("*"))
    assert sorted(file.stat().st_size for file in to.rglob("part-*")) == sizes
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
