"""Access to the Prefect servers that we start: a token per start of the server, and a password for its pages.

A token is valid while the process that holds the server's port lives. Another user's process may listen there afterwards; a
token that a client sends to it by mistake is worthless by then.
"""

from __future__ import annotations

import os
import secrets
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from alignment_core.errors import UserError

if TYPE_CHECKING:
    import httpx

URL, TOKEN = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
OLDER_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
LOOPBACK = ("localhost", "::1", "0.0.0.0")
OF_DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")
"""Prefixes of the variables that may hold the database password."""


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(32)


def url_of(port: int) -> str:
    """The address of a server's API."""
    return f"http://127.0.0.1:{port}/api"


def same_server(url: str, other: str) -> bool:
    """Whether two API addresses belong to one server; all names of this machine are equal."""
    return _normal(url) == _normal(other)


def _normal(url: str) -> tuple[str, str, int | None, str]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, "127.0.0.1" if host in LOOPBACK else host, port, parts.path.rstrip("/")


def of_client(url: str, token: str) -> dict[str, str]:
    """Environment variables of a client process."""
    return {URL: url, TOKEN: token}


def of_server(port: int, token: str) -> dict[str, str]:
    """Environment variables of a server process: it requires the token, and rejects requests from pages of other origins."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": token,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
    }


def basic(secret: str) -> str:
    """The value of an authorization header with a token or password."""
    return f"Basic {b64encode(secret.encode()).decode()}"


def headers() -> dict[str, str]:
    """Headers that authorize a request to the server in the environment."""
    token, key = os.environ.get(TOKEN), os.environ.get("PREFECT_API_KEY")
    if token:
        return {"authorization": basic(token)}
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def client() -> Iterator[httpx.Client]:
    """A client of the server in the environment. Prefect's own client takes seconds to import."""
    import httpx

    with httpx.Client(base_url=os.environ[URL], headers=headers(), timeout=10) as client:
        csrf_client = str(uuid.uuid4())
        response = client.get("/csrf-token", params={"client": csrf_client})
        if response.is_success:  # otherwise the server requires no CSRF token
            client.headers.update({"prefect-csrf-client": csrf_client, "prefect-csrf-token": response.json()["token"]})
        yield client


PASSWORD = "ALIGN_SERVER_PASSWORD"
"""Variable with the password that people enter on the server's pages instead of the token."""
LEAST_PASSWORD = 8
OF_PAGES = {"PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true"}
"""Requests that change something need a CSRF token of one of the server's pages."""


def split(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split into variables for every process, and those of the database, for the server only."""
    database = {name: value for name, value in environment.items() if name.startswith(OF_DATABASE)}
    return {name: value for name, value in environment.items() if name not in database}, database


def shown_database(settings: Mapping[str, str]) -> str | None:
    """The database in a server's settings, without password; None for Prefect's default, SQLite."""
    url = settings.get(DATABASE) or settings.get(OLDER_DATABASE)
    if url is None:
        return settings.get("PREFECT_SERVER_DATABASE_HOST")  # the parts of the URL may be given one by one
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host, query=""))


def lost_server(error: BaseException | None) -> str | None:
    """A sentence for an error that means that the run's server is gone or no longer accepts its token; else None."""
    import httpx

    failed = _failed_request(error)
    refused = isinstance(failed, httpx.HTTPStatusError) and failed.response.status_code in (401, 403)
    if not isinstance(failed, httpx.TransportError) and not (refused and TOKEN in os.environ):
        return None
    problem = "no longer accepts this run's token" if refused else "no longer answers"
    reason = "when the process behind `align up` ends, its token becomes invalid"
    return (
        f"the Prefect server at {os.environ[URL]} {problem} ({reason}); finished stages are kept, and `align resume "
        "last` continues with whatever server is running then"
    )


def unreachable(error: BaseException | None) -> str | None:
    """A sentence for an error that means that the server in PREFECT_API_URL cannot be reached; else None."""
    import httpx

    if not isinstance(_failed_request(error), httpx.TransportError):
        return None
    return f"no server answers at {os.environ[URL]} ({URL}): start it, or unset {URL} to use that of `align up`"


def _failed_request(error: BaseException | None) -> httpx.HTTPError | None:
    """The first failed request to the server in the environment among an error and its causes."""
    import httpx

    while error is not None:
        if isinstance(error, httpx.HTTPError) and _address(error).startswith(os.environ.get(URL, "none")):
            return error
        error = error.__cause__
    return None


def _address(error: httpx.HTTPError) -> str:
    """The URL of the failed request; "" if the error has none."""
    try:
        return str(error.request.url)
    except RuntimeError:  # httpx raises it for an error without a request
        return ""


def write(file: Path, token: str) -> None:
    """Write a token to a file that only this user can read."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(token)
    os.replace(partial, file)


def password(file: Path) -> str:
    """The password in a file, which becomes readable for this user only. A missing file gets a new password.

    Raises UserError for a password that is too short.
    """
    secret = (read(file) or "").strip()
    if not secret:
        secret = secrets.token_urlsafe(16)
        write(file, secret)
    if len(secret) < LEAST_PASSWORD:
        raise UserError(
            f"{file}: the password must have {LEAST_PASSWORD} characters or more; delete the file for a new one"
        )
    with suppress(OSError):
        file.chmod(0o600)
    return secret


def read(file: Path) -> str | None:
    """The content of a token file, if it exists."""
    with suppress(OSError):
        return file.read_text()
    return None
