"""Who may talk to the Prefect servers that we start: whoever holds the token of this start of the server.

A token lives as long as the process that holds the server's port. Whoever listens there afterwards may be a stranger, and
what a client tells him by mistake is worth nothing any more.
"""

from __future__ import annotations

import os
import secrets
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from alignment_core.errors import UserError

URL, TOKEN = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
OLDER_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
LOOPBACK = ("localhost", "::1", "0.0.0.0")
OF_DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")
"""Beginnings of the variables that may hold a password of the database."""


def new_token() -> str:
    """A password that nobody guesses."""
    return secrets.token_urlsafe(32)


def url_of(port: int) -> str:
    """Address of a server's API."""
    return f"http://127.0.0.1:{port}/api"


def same_server(one: str, other: str) -> bool:
    """Whether two addresses of APIs are of one server: this machine's own names are one."""
    return _normal(one) == _normal(other)


def _normal(url: str) -> tuple[str, str, int | None, str]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, "127.0.0.1" if host in LOOPBACK else host, port, parts.path.rstrip("/")


def of_client(url: str, token: str) -> dict[str, str]:
    """Settings of a process that talks to the server."""
    return {URL: url, TOKEN: token}


def of_server(port: int, token: str) -> dict[str, str]:
    """Settings of a server's process: it answers who knows the token, and web pages of its own alone."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": token,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
    }


def headers() -> dict[str, str]:
    """What a request to the server that the environment names has to show."""
    token, key = os.environ.get(TOKEN), os.environ.get("PREFECT_API_KEY")
    if token:
        return {"authorization": f"Basic {b64encode(token.encode()).decode()}"}
    return {"authorization": f"Bearer {key}"} if key else {}


PASSWORD = "ALIGN_SERVER_PASSWORD"
"""Variable of a server with pages: what a person shows there instead of the token."""
LEAST_PASSWORD = 8
OF_PAGES = {"PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true"}
"""Of a server with pages: a request that changes something has to show that a page of its own made it."""


def split(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What any process may know, and what the server alone has to know of the database."""
    database = {name: value for name, value in environment.items() if name.startswith(OF_DATABASE)}
    return {name: value for name, value in environment.items() if name not in database}, database


def shown_database(settings: Mapping[str, str]) -> str | None:
    """The database that a server's settings name, without its password; None is Prefect's own default, SQLite."""
    url = settings.get(DATABASE) or settings.get(OLDER_DATABASE)
    if url is None:
        return settings.get("PREFECT_SERVER_DATABASE_HOST")  # somebody gives its parts
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host, query=""))


def lost_server(error: BaseException | None) -> str | None:
    """What to tell about an error that means: the server of the run is away, or does not know its token any more."""
    import httpx

    while error is not None:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        lost = isinstance(error, httpx.TransportError) or (refused and TOKEN in os.environ)
        if lost and _address(error).startswith(os.environ.get(URL, "none")):
            what = "no longer accepts this run's token" if refused else "no longer answers"
            why = "when the process behind `align up` ends, its token becomes invalid"
            return (
                f"the Prefect server at {os.environ[URL]} {what} ({why}); finished stages are kept, and `align resume "
                "last` continues with whatever server is running then"
            )
        error = error.__cause__
    return None


def unreachable(error: BaseException | None) -> str | None:
    """What to tell about an error that means: the server that PREFECT_API_URL names cannot be reached."""
    import httpx

    while error is not None:
        if isinstance(error, httpx.TransportError) and _address(error).startswith(os.environ.get(URL, "none")):
            return f"no server answers at {os.environ[URL]} ({URL}): start it, or unset {URL} to use that of `align up`"
        error = error.__cause__
    return None


def _address(error: Any) -> str:
    """What a request was about that httpx could not send, or got no good answer to."""
    try:
        return str(error.request.url)
    except RuntimeError:  # it does not know
        return ""


def write(file: Path, token: str) -> None:
    """Keep a token where this user's processes find it, and nobody else."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(token)
    os.replace(partial, file)


def password(file: Path) -> str:
    """The password that a file holds, which only this user may read from now on; a new one where it is not there.

    Raises UserError for one that is too short.
    """
    kept = (read(file) or "").strip()
    if not kept:
        kept = secrets.token_urlsafe(16)
        write(file, kept)
    if len(kept) < LEAST_PASSWORD:
        raise UserError(
            f"{file}: the password must have {LEAST_PASSWORD} characters or more; delete the file for a new one"
        )
    with suppress(OSError):
        file.chmod(0o600)
    return kept


def read(file: Path) -> str | None:
    """The token that ``write`` kept, if there is one."""
    with suppress(OSError):
        return file.read_text()
    return None
