"""The sign-in to the pages of Prefect's server: no error before anything is typed, and a password that stays."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import stat
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignment.flows import access
from alignment.flows.service.sign_in import GUARD, SIGN_IN, SignIn
from alignment_core.errors import UserError

TOKEN, PASSWORD = "token-of-this-start", "password-of-a-person"
PAGE = '<html><head><script type="module" src="/app.js"></script></head></html>'


async def prefect(scope: Any, receive: Any, send: Any) -> None:
    """Answers as Prefect does: pages for any path, compressed where a client takes that, and the header that it was sent."""
    headers = dict(scope["headers"])
    if scope["path"].startswith("/api/"):
        kind, body = b"application/json", headers.get(b"authorization", b"none")
    elif scope["path"] == "/app.js":
        kind, body = b"text/javascript", b"<script"
    else:
        kind, body = b"text/html; charset=utf-8", PAGE.encode()
    if b"gzip" in headers.get(b"accept-encoding", b"") and kind != b"text/javascript":
        body = gzip.compress(body)
    length = str(len(body)).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", kind), (b"content-length", length)],
        }
    )
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:]})


def get(path: str, secret: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Basic {b64encode(secret.encode()).decode()}"} if secret else {}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=SignIn(prefect, TOKEN, PASSWORD))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            client.headers["accept-encoding"] = "identity" if path.startswith("/api/") else "gzip"
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/", "/login", "/runs/flow-run/1"])
def test_the_guard_script_runs_before_prefects_own_scripts(path: str) -> None:
    page = get(path).text
    assert page == PAGE.replace("<script", GUARD + "<script", 1)


def test_files_other_than_pages_are_served_unchanged() -> None:
    assert get("/app.js").text == "<script"


def test_our_page_asks_for_the_password_and_shows_no_error() -> None:
    answer = get("/sign-in?next=/runs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert '<p id="problem" role="alert"></p>' in answer.text
    assert TOKEN not in answer.text
    assert PASSWORD not in answer.text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs a JavaScript engine")
def test_sign_in_never_redirects_to_another_server() -> None:
    """Browsers read `\\` as `/`, and take tabs and ends of lines out of a URL first: WHATWG's URL standard, 4.4."""
    own = ["/", "/runs/flow-run/1?tab=logs"]
    others = [
        "//h.example",
        "/\\h.example",
        "/\t/h.example",
        "/\n/h.example",
        "/\r\\h.example",
        "https://h.example",
        "js:1",
    ]
    (condition,) = re.findall(r"replace\((/.*?/\.test\(next\))", SIGN_IN)
    script = (
        f"const to = next => new URL({condition} ? next : '/', 'http://127.0.0.1:4200/sign-in').href;"
        f"console.log(JSON.stringify({json.dumps([*own, *others])}.map(to)))"
    )
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    server = "http://127.0.0.1:4200"
    assert json.loads(done.stdout) == [*(server + path for path in own), *[f"{server}/"] * len(others)]


@pytest.mark.parametrize(
    ("shown", "passed_on"), [(PASSWORD, TOKEN), (TOKEN, TOKEN), ("guessed", "guessed"), (PASSWORD[:-1], PASSWORD[:-1])]
)
def test_the_password_counts_as_the_token(shown: str, passed_on: str) -> None:
    assert get("/api/version", shown).text == f"Basic {b64encode(passed_on.encode()).decode()}"


def test_without_a_credential_none_is_forwarded() -> None:
    assert get("/api/version").text == "none"


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_the_password_is_kept_and_readable_only_by_its_user(tmp_path: Path) -> None:
    file = tmp_path / "password"
    before = os.umask(0)
    try:
        first = access.password(file)
    finally:
        os.umask(before)
    assert (access.password(file), mode(file)) == (first, 0o600)
    file.write_text("chosen by a person\n")
    file.chmod(0o644)
    assert (access.password(file), mode(file)) == ("chosen by a person", 0o600)
    file.unlink()
    assert access.password(file) not in (first, "chosen by a person")
    file.write_text("short")
    with pytest.raises(UserError, match="8 characters or more"):
        access.password(file)
