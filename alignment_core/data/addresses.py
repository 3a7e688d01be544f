"""Files at addresses (``s3://``, ``gs://``, ``https://``, ``hf://``): listed and pinned once, then read at the pinned version.

They are read through fsspec, so that a file need not fit into memory or on the disk. Credentials come from the usual places of
each service's tools (``AWS_*``, ``~/.aws``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``HF_TOKEN``, ``~/.netrc``), never from an
address.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict

from alignment_core.artifacts.os_errors import check_room, explained
from alignment_core.credentials import resolved
from alignment_core.data.hub import commit_of
from alignment_core.errors import (
    AlignmentError,
    DataError,
    EnvironmentFault,
    NotFound,
    Unavailable,
    UserError,
    first_line,
)
from alignment_core.files import sync
from alignment_core.heartbeat import beating
from alignment_core.network import through_proxy
from alignment_core.recipes.paths import file_of

ATTEMPTS = 6
"""Attempts of a read while the server does not answer."""
BLOCK = 16 << 20
"""Bytes of one request."""
_DOWNLOADS = 4
_CONNECT_SECONDS, _SILENT_SECONDS = 30, 60
"""Timeouts of a web server: for a connection, and for the next bytes."""
_SETTINGS = ("AWS_", "GOOGLE_", "HF_", "STORAGE_EMULATOR_HOST", "SSL_CERT", "NO_PROXY", "HTTPS_PROXY", "HTTP_PROXY")
"""Variables that a connection depends on."""
_VERSIONS = ("ETag", "blob_id", "md5Hash", "generation", "Last-Modified")
"""Names of a file's version in fsspec's file systems: S3 and HTTP, the Hub, GCS, and HTTP without ETags."""
_REVISION = r"@(refs/(?:convert|pr)/[^/]+|[^/]+)"
_HUB = re.compile(rf"hf://((?:datasets/)?[^/@]+/[^/@]+)(?:{_REVISION})?(/.*)?")


class RemoteFile(BaseModel):
    """A file at an address and the version that was there when it was pinned.

    It has the attributes of a ``Path`` that :func:`alignment_core.data.files.read_file` uses.
    """

    model_config = ConfigDict(frozen=True)

    address: str
    version: str
    """ETag, generation, Git blob or time of change, as the server says; else ``sha256:`` and the digest of the bytes."""
    size: int | None = None
    """Bytes, where the server says so."""

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        return PurePosixPath(file_of(self.address)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO:
        """The bytes of the file. Raises DataError if its version is no longer the pinned one."""
        return io.BufferedReader(_Reader(self), 1 << 20)

    def check(self) -> None:
        """Raise DataError if the address has another version by now."""
        with _explained(self.address):
            files, path = _connected(self.address)
            files.invalidate_cache()
            current = _pinned(files, self.address, files.info(path))
        if current != self:
            raise _changed(self.address)


def pinned_files(address: str, revision: str | None = None) -> list[RemoteFile]:
    """The files at an address, which may be a glob (not of a web server) or a folder, in the order of their names.

    ``revision`` is of the Hub. Raises UserError if there is none, EnvironmentFault without credentials or a package,
    Unavailable if the server does not answer.
    """
    address = _at_commit(address, revision)
    with _explained(address):
        files, path = _connected(address)
        if is_glob(address):
            path, listing = files._strip_protocol(fixed_folder(address)), files.glob(path, detail=True)
        elif (info := files.info(path))["type"] != "directory":
            return [_pinned(files, address, info)]
        else:
            listing = files.find(path, detail=True)
        scheme = address.partition("://")[0]
        entries = sorted((name, info) for name, info in listing.items() if info["type"] == "file" and name[-1] != "/")
        if not entries:
            files.ls(path, refresh=True)  # says whether there is a bucket
            raise FileNotFoundError(address)
        return [_pinned(files, f"{scheme}://{name}", info) for name, info in entries]


def read_bytes(address: str, most: int) -> bytes:
    """The first ``most`` bytes of the file at an address, in its present version. Raises as :func:`pinned_files` does."""
    as_stream = {"block_size": 0} if address.startswith("http") else {}
    for attempt in range(ATTEMPTS):
        try:
            with _explained(address):
                files, path = _connected(address)
                with files.open(path, "rb", **as_stream) as opened:
                    content = b""
                    while len(content) < most and (more := opened.read(most - len(content))):
                        content += more
                    return content
        except Unavailable:
            if attempt + 1 == ATTEMPTS:
                raise
            time.sleep(min(10.0, 0.5 * 2**attempt))
    raise AssertionError("unreachable")


def pinned_folder(address: str, patterns: Sequence[str]) -> dict[str, RemoteFile]:
    """The files of the folder at an address whose relative paths match one of the globs, by relative path. Raises as
    :func:`pinned_files` does, and UserError for the address of a web server."""
    if address.startswith("http"):
        raise UserError(
            f"{address}: a web server does not list the files of a folder; use s3://, gs:// or hf://, or a path"
        )
    named = {name_within(address, file): file for file in pinned_files(f"{address.rstrip('/')}/")}
    return {
        name: file
        for name, file in named.items()
        if _is_place(name) and any(PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in patterns)
    }


def _is_place(name: str) -> bool:
    """Whether a name is a path below a folder: keys of objects may have empty parts, `.` and `..`, which lead elsewhere."""
    return not {"", ".", ".."}.intersection(name.split("/"))


def is_glob(address: str) -> bool:
    """Whether the address is a pattern of addresses."""
    return not address.startswith("http") and re.search(r"[*?[]", file_of(address)) is not None


def fixed_folder(glob: str) -> str:
    """The folder in front of the first glob of an address."""
    return re.split(r"[*?[]", glob, maxsplit=1)[0].rpartition("/")[0]


def name_within(address: str, file: RemoteFile) -> str:
    """The path of a file within the folder or glob at an address, else its name. The same for each commit."""
    if is_same(address, file):
        return file.name
    given = _without_commit(address)
    folder = fixed_folder(given) if is_glob(given) else given.rstrip("/")
    return _without_commit(file.address).removeprefix(f"{folder}/")


def is_same(address: str, file: RemoteFile) -> bool:
    """Whether the address is the file's own, at any commit."""
    return _without_commit(address) == _without_commit(file.address)


def is_of_address(file: RemoteFile) -> bool:
    """Whether the version comes from a web server, where other content at another address may have the same version."""
    return file.address.startswith("http") and not file.version.startswith("sha256:")


def _without_commit(address: str) -> str:
    return re.sub(rf"^(hf://[^@]+){_REVISION}", r"\1", address)


def download(files: Mapping[str, RemoteFile], folder: Path) -> None:
    """Write files below a folder, by relative path, several at a time. Files that are already complete stay.

    Raises UserError for a path that leads out of the folder, and EnvironmentFault if the files do not fit on the disk.
    """
    for name, file in files.items():
        if not _is_place(name):
            raise UserError(f"{file.address}: {name!r} is no path below a folder")

    def is_complete(name: str) -> bool:
        path = folder / name
        return path.is_file() and files[name].size in (None, path.stat().st_size)

    def partial_of(name: str) -> Path:
        path = folder / name
        return path.with_name(f".{path.name}.partial")

    def fetch(name: str) -> None:
        path, file, partial = folder / name, files[name], partial_of(name)
        try:
            with explained("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with file.open() as source, partial.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                    target.flush()
                    os.fsync(target.fileno())
            file.check()
            if file.size not in (None, written := partial.stat().st_size):
                raise Unavailable(f"{file.address}: the server sent {written} of {file.size} bytes")
            partial.replace(path)
            sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)  # it would take up the room that another attempt needs

    missing = [name for name in files if not is_complete(name)]
    if not missing:
        return
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in missing:
            partial_of(name).unlink(missing_ok=True)  # of an attempt that was killed; it takes up room
    check_room(folder, sum(files[name].size or 0 for name in missing), files[missing[0]].address.rpartition("/")[0])
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(beating(pool.map(fetch, missing)))


class _Reader(io.RawIOBase):
    """The bytes of a pinned file. A read is repeated while the server does not answer."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self._address = file.address
        file.check()
        with _explained(file.address):
            files, path = _connected(file.address)
            conditions = _conditions(file)
            as_stream = file.address.startswith("http") and not (file.size and _has_ranges(files, path, conditions))
            self._opened = files.open(path, "rb", block_size=0 if as_stream else BLOCK, **conditions)
        # It is the version that was there when it was opened, after the check above.
        if _version_in(getattr(self._opened, "details", None) or {}) not in (None, file.version):
            raise _changed(file.address)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # also without ranges: Parquet's reader then gets the error of `seek`, which names the reason

    @property
    def _has_ranges(self) -> bool:
        return self._opened.size is not None

    def tell(self) -> int:
        return int(self._opened.tell())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if not self._has_ranges:
            raise io.UnsupportedOperation("the server sends it only as a whole; download it, and give the file's path")
        return int(self._opened.seek(offset, whence))

    def readinto(self, buffer: Any, /) -> int:
        start = self.tell()
        for attempt in range(ATTEMPTS):
            try:
                with _explained(self._address):
                    data = self._opened.read(len(buffer))
                if self._has_ranges and not data and start < self._opened.size:  # or the rows would end here
                    raise Unavailable(f"{self._address}: the server sent {start} of {self._opened.size} bytes")
                break
            except Unavailable:
                if not self._has_ranges or attempt + 1 == ATTEMPTS:
                    raise
                time.sleep(min(10.0, 0.5 * 2**attempt))
                self._opened.seek(start)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()


def _conditions(file: RemoteFile) -> dict[str, Any]:
    """Options that make a server refuse to send another version; s3fs sends ``If-Match`` by itself."""
    if not file.address.startswith("http") or file.version.startswith(("sha256:", "W/")):
        return {}
    header = "If-Match" if file.version.startswith('"') else "If-Unmodified-Since"
    return {"headers": {header: file.version}}


def _has_ranges(files: Any, url: str, conditions: Mapping[str, Any]) -> bool:
    """Whether a web server sends parts of a file: by a request, because many servers do not announce it."""
    import fsspec.asyn

    async def has_ranges() -> bool:
        session = await files.set_session()
        headers = {**conditions.get("headers", {}), "Range": "bytes=0-0"}
        async with session.get(files.encode_url(url), headers=headers) as answer:
            answer.raise_for_status()
            return bool(answer.status == 206)

    return bool(fsspec.asyn.sync(files.loop, has_ranges))


def _version_in(info: Mapping[str, Any]) -> str | None:
    """The version that a file system names; None if it names none."""
    return next((str(info[name]) for name in _VERSIONS if info.get(name)), None)


def _pinned(files: Any, address: str, info: Mapping[str, Any]) -> RemoteFile:
    version = _version_in(info)
    if version is None:
        with files.open(info["name"], "rb", block_size=BLOCK) as opened:
            version = f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}"
    return RemoteFile(address=address, version=version, size=info.get("size"))


def _at_commit(address: str, revision: str | None) -> str:
    """An address of the Hub at the current commit of its revision; other addresses unchanged."""
    match = _HUB.fullmatch(address)
    if match is None:
        return address
    repo, written, inner = match.groups()
    kind: Literal["model", "dataset"] = "dataset" if repo.startswith("datasets/") else "model"
    return f"hf://{repo}@{commit_of(repo.removeprefix('datasets/'), written or revision, kind)}{inner or ''}"


def _connected(address: str) -> tuple[Any, str]:
    """The file system of an address, and its path there."""
    scheme = address.partition("://")[0]
    environment = tuple((name, value) for name, value in os.environ.items() if name.upper().startswith(_SETTINGS))
    files = _file_system(scheme, "?versionId=" in address, os.getpid(), environment)
    return files, files._strip_protocol(resolved(address, address))


@functools.lru_cache(maxsize=8)
def _file_system(scheme: str, by_version: bool, process: int, environment: Sequence[tuple[str, str]]) -> Any:
    """One connection per process and environment: a fork must not share it, and changed credentials need a new one."""
    import aiohttp
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True}
    if scheme == "s3":
        options |= _s3_options() | {"version_aware": by_version}
    elif scheme.startswith("http"):
        # aiohttp's own limit of five minutes is for a whole body
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS)
        headers = {"Accept-Encoding": "identity"}
        options["client_kwargs"] = {"trust_env": True, "headers": headers, "timeout": timeout}
    files = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        files.retries = 1  # botocore repeats requests, and _Reader reads that break off
    return files


def _s3_options() -> dict[str, Any]:
    from aiobotocore.session import AioSession

    from alignment_core.artifacts.s3_client import prepared

    session = AioSession()
    region, settings = prepared(session)
    return {"session": session, "client_kwargs": {"region_name": region}, "config_kwargs": settings}


def _changed(address: str) -> DataError:
    return DataError(f"{address}: is gone or has changed since this run started")


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn the errors of file systems into ours, in one sentence."""
    try:
        yield
    except AlignmentError:
        raise
    except Exception as error:  # each file system raises errors of its own libraries
        raise _fault(error, address) from error


def _fault(error: Exception, address: str) -> AlignmentError:
    import aiohttp

    chain = [error, *(cause for cause in (error.__cause__, error.__context__) if isinstance(cause, Exception))]
    scheme = address.partition("://")[0]
    if isinstance(error, ImportError):
        package = "gcsfs" if scheme == "gs" else error.name
        return EnvironmentFault(f"{address}: reading {scheme}:// needs the package {package}: pip install {package}")
    if scheme == "s3" and (fault := _of_s3(chain, address)):
        return fault
    status = next((cause.status for cause in chain if isinstance(cause, aiohttp.ClientResponseError)), 0)
    reason = f"HTTP {status}" if status else first_line(chain[-1])
    if type(error).__name__ == "FileExpired" or status == 412:
        return _changed(address)
    if status in (401, 403) or isinstance(error, PermissionError):
        return EnvironmentFault(
            f"{address}: access is denied ({reason}); are there credentials for it on this machine?"
        )
    if any(isinstance(cause, aiohttp.ClientConnectorCertificateError) for cause in chain):
        return EnvironmentFault(f"{address}: its certificate is not trusted ({reason}); set SSL_CERT_FILE")
    outages = aiohttp.ClientError | TimeoutError | ConnectionError
    if status >= 500 or status == 429 or (status == 0 and any(isinstance(cause, outages) for cause in chain)):
        return Unavailable(f"{address}: the server does not answer{through_proxy(address)} ({reason})")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{address}: there is no such file")
    return EnvironmentFault(f"{address}: cannot be read ({reason})")


def _of_s3(chain: Sequence[Exception], address: str) -> AlignmentError | None:
    """Our error for botocore's among these; None if there is none."""
    from botocore.exceptions import BotoCoreError, ClientError

    from alignment_core.artifacts.s3_client import LOST, code_of, translate_errors

    cause = next((error for error in chain if isinstance(error, BotoCoreError | ClientError)), None)
    if cause is None:
        return None
    if code_of(cause) in LOST:
        return _changed(address)
    try:
        with translate_errors("read", address, ""):
            raise cause
    except NotFound:
        return UserError(f"{address}: there is no such file")
    except AlignmentError as fault:
        return fault
