"""Requests to one dataset repo of the Hugging Face Hub: retries, and refusals as the project's errors."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from alignment_core.errors import (
    AlignmentError,
    EnvironmentFault,
    InfrastructureError,
    NotFound,
    StoreError,
    Unavailable,
)
from alignment_core.network import through_proxy

TRIES = 6
"""Attempts of a request without an answer; the pauses between them double from a fifth of a second."""
LONGEST_WAIT = 120
"""Longest wait of a throttled request, in seconds, if the Hub says when to retry."""
_CHUNK = 1 << 20
_FULL = re.compile(r"quota|storage|payment|too large", re.IGNORECASE)
_MAKE_ROOM = "free space (docs/stores.md, The Hub) or raise the quota"
_TIMEOUT = httpx2.Timeout(60.0, connect=10.0)
_LIMITS = httpx2.Limits(max_connections=64, max_keepalive_connections=64)


class NoRepo(NotFound):
    """There is no such repo, or this token may not see it."""


class Moved(InfrastructureError):
    """The head is not the commit that was named as the parent."""


class HubRepo:
    """The dataset repo ``name``, which is ``organisation/name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uri = f"hf://{name}"

    def head(self) -> tuple[str, float]:
        """The newest commit, and the Hub's time in seconds since the epoch."""
        answer = self.request("GET", self._api(), f"look at {self.uri}", params={"expand": "sha"})
        return answer.json()["sha"], parsedate_to_datetime(answer.headers["Date"]).timestamp()

    def entries(self, revision: str, paths: list[str], expand: bool) -> list[dict[str, Any]]:
        """The Hub's entries of those ``paths`` that exist, with the last commit of each if ``expand``."""
        query = {"paths": paths, "expand": str(expand).lower()}
        answer = self.request("POST", self._api("paths-info", revision), f"look at {self.uri}/{paths[0]}", data=query)
        return list(answer.json())

    def below(self, revision: str, folder: str) -> Iterator[dict[str, Any]]:
        """The Hub's entries of everything below a folder, with their last commits."""
        url = self._api("tree", revision, *([folder] if folder else [])) + "?recursive=true&expand=true"
        while url:
            answer = self.request("GET", url, f"list {self.uri}/{folder}")
            yield from answer.json()
            url = answer.links.get("next", {}).get("url", "")

    def following(self, commit: str) -> str:
        """Title and message of the commit that came after ``commit``; empty if there is none."""
        url, after = self._api("commits", "main"), ""
        while url:
            answer = self.request("GET", url, f"look at the commits of {self.uri}")
            for commit_entry in answer.json():
                if commit_entry["id"] == commit:
                    return after
                after = f"{commit_entry['title']}\n{commit_entry['message']}"
            url = answer.links.get("next", {}).get("url", "")
        return ""

    def commit(self, lines: bytes) -> None:
        """Send a commit once. Raises Moved, or Unavailable when it is unknown whether it was made."""
        kind = {"Content-Type": "application/x-ndjson"}
        self.request(
            "POST", self._api("commit", "main"), f"write to {self.uri}", once=True, content=lines, headers=kind
        )

    def locate(self, path: str) -> tuple[str, int]:
        """The commit that has ``path`` now, and the size of the file. Raises NotFound."""
        answer = self._resolve(path, "main", "HEAD")
        commit, size = answer.headers["X-Repo-Commit"], answer.headers.get("X-Linked-Size")
        if size is None and answer.next_request and str(answer.next_request.url).startswith(endpoint()):
            answer = self.request("HEAD", str(answer.next_request.url), f"look at {self.uri}/{path}")
        return commit, int(size or answer.headers["Content-Length"])

    def pieces(self, path: str, revision: str = "main", start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` (None: to the end) at one commit; resumes after a broken connection."""
        broken = 0
        while end is None or start < end:
            headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
            answer = self._resolve(path, revision, "GET", headers, stream=True)
            try:
                for response in (
                    *answer.history,
                    answer,
                ):  # storage of large files, the last one, names no commit
                    revision = response.headers.get("X-Repo-Commit", revision)
                at = start if answer.status_code == 206 else 0  # a server may ignore ranges
                if end is None and "Content-Length" in answer.headers:
                    end = at + int(answer.headers["Content-Length"])
                for chunk in answer.iter_bytes(_CHUNK):
                    new = chunk[max(0, start - at) :][: None if end is None else end - start]
                    at += len(chunk)
                    if new:
                        yield new
                        start, broken = start + len(new), 0
                if end is None or start == end:
                    return
            except httpx2.TransportError as error:
                broken += 1
                if broken == TRIES:
                    raise Unavailable(f"cannot read {self.uri}/{path}: the connection keeps breaking") from error
            finally:
                answer.close()

    def request(
        self, method: str, url: str, action: str, once: bool = False, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        """A successful response. Throttled requests are retried; unless ``once``, unanswered ones and server errors
        are retried too. Raises what :func:`refusal` returns."""
        deadline, pause = time.monotonic() + LONGEST_WAIT, 0.2
        options["headers"] = {**_authorization(), "Accept-Encoding": "identity", **options.get("headers", {})}
        follow = method != "HEAD"
        for attempt in range(1, TRIES + 1):
            with translate_errors(action):
                try:
                    sent = _client().build_request(method, url, **options)
                    answer = _client().send(sent, stream=stream, follow_redirects=follow)
                except httpx2.TransportError:
                    if once or attempt == TRIES:
                        raise
                else:
                    if answer.status_code < 400:
                        return answer
                    answer.read()
                    busy = answer.status_code == 429
                    wait = _wait_of(answer) if busy else 0.0
                    again = busy or (answer.status_code >= 500 and not once)
                    if not again or attempt == TRIES or time.monotonic() + wait > deadline:
                        raise refusal(answer, action)
                    pause = max(pause, wait)
            time.sleep(pause * random.uniform(0.75, 1.25))  # jitter: throttled processes must not return together
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _resolve(
        self, path: str, revision: str, method: str, headers: dict[str, str] | None = None, stream: bool = False
    ) -> httpx2.Response:
        url = f"{endpoint()}/datasets/{self.name}/resolve/{quote(revision, safe='')}/{quote(path)}"
        try:
            return self.request(method, url, f"read {self.uri}/{path}", stream=stream, headers=headers or {})
        except NoRepo:
            raise
        except NotFound:
            raise NotFound(f"{self.uri} has no {path}") from None

    def _api(self, *rest: str) -> str:
        return "/".join((f"{endpoint()}/api/datasets/{self.name}", *(quote(part, safe="") for part in rest)))


def endpoint() -> str:
    """The address of the Hub: ``HF_ENDPOINT``, or huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or str(constants.ENDPOINT)


def token() -> str:
    """The token in ``HF_TOKEN`` or the file of ``hf auth login``."""
    known = get_token()
    if known is None:
        raise EnvironmentFault("there is no token for the Hub: set HF_TOKEN, or log in with `hf auth login`")
    return known


def refusal(answer: httpx2.Response, action: str) -> AlignmentError:
    """The error for a response of 400 or more, with the remedy."""
    status, message = answer.status_code, answer.headers.get("X-Error-Message") or answer.reason_phrase
    sentence = f"cannot {action}: "
    if status in (402, 413, 507) or (status == 403 and _FULL.search(message)):
        return EnvironmentFault(f"{sentence}{message}; {_MAKE_ROOM}")
    if status in (404, 401) and answer.headers.get("X-Error-Code") == "RepoNotFound":
        return NoRepo(f"{sentence}the Hub has no such dataset repo, or this token may not see it")
    if status == 401:
        return EnvironmentFault(
            f"{sentence}the Hub does not know this token ({message}); renew HF_TOKEN or `hf auth login`"
        )
    if status == 403:
        return EnvironmentFault(
            f"{sentence}this token may not ({message}); take one with write access to the organisation"
        )
    if status == 404:
        return NotFound(f"{sentence}{message}")
    if status in (409, 412):
        return Moved(f"{sentence}{message}")
    if status == 429:
        when = f"; retry in {_wait_of(answer):.0f} seconds" if _wait_of(answer) else ""
        return Unavailable(f"{sentence}the Hub throttles this account ({message}){when}")
    if status == 408 or status >= 500:
        return Unavailable(f"{sentence}the Hub answers {status}, {message}")
    return StoreError(f"{sentence}the Hub answers {status}, {message}")


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Raise errors of the client and the connection as EnvironmentFault, Unavailable, NotFound or StoreError."""
    try:
        yield
    except (HfHubHTTPError, httpx2.TransportError, OfflineModeIsEnabled, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise refusal(cause.response, action) from error
        if isinstance(cause, OfflineModeIsEnabled):
            raise EnvironmentFault(f"cannot {action}: HF_HUB_OFFLINE is set; unset it") from error
        if isinstance(cause, httpx2.TransportError):
            raise Unavailable(
                f"cannot {action}: {endpoint()} does not answer{through_proxy(endpoint())} ({cause})"
            ) from error
        if _FULL.search(str(cause)):  # the client's error for a refused LFS object
            raise EnvironmentFault(f"cannot {action}: {cause}; {_MAKE_ROOM}") from error
        raise StoreError(f"cannot {action}: {cause}") from error


def _authorization() -> dict[str, str]:
    if constants.is_offline_mode():
        raise EnvironmentFault("HF_HUB_OFFLINE is set, but the store is on the Hub: unset it, or choose another store")
    return {"Authorization": f"Bearer {token()}"}


def _wait_of(answer: httpx2.Response) -> float:
    """Seconds after which the Hub allows a retry; 0 if it does not say."""
    retry_after = answer.headers.get("Retry-After", "")
    limit = re.search(r"\br=0\b.*\bt=(\d+)", answer.headers.get("RateLimit", ""))
    return float(retry_after) if retry_after.isdigit() else float(limit[1]) if limit else 0.0


_clients = list[httpx2.Client]()  # none or one, which a fork must not share
os.register_at_fork(after_in_child=_clients.clear)


def _client() -> httpx2.Client:
    if not _clients:
        _clients.append(httpx2.Client(timeout=_TIMEOUT, limits=_LIMITS))
    return _clients[0]
