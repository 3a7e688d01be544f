"""Checks of this machine's surroundings: loopback, Prefect's API, the store, proxies, and the presence of credentials."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from alignment_core.artifacts import open_store
from alignment_core.doctor.machine import SECONDS, Answer, Check
from alignment_core.doctor.storage import promises_of


def loopback() -> Answer:
    """Whether a server on 127.0.0.1 can be reached by its port, as Ray and Prefect need it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=SECONDS / 2) as client,
    ):
        server.settimeout(SECONDS / 2)
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"?")
            accepted.settimeout(SECONDS / 2)
            received = accepted.recv(1)
    return ("ok", "a port on 127.0.0.1 was bound and reached") if received else ("failed", "127.0.0.1 loses data")


def prefect() -> Answer:
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        return "ok", "PREFECT_API_URL is not set: `align run` starts its own server"
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")  # without a password
    cure = "start the server, or unset PREFECT_API_URL"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "failed", "PREFECT_API_URL is not an http address: write it as http://host:4200/api"
    try:
        urllib.request.urlopen(f"{server}{parts.path.rstrip('/')}/health", timeout=SECONDS - 0.5).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return "ok", f"{server} answers, and asks for PREFECT_API_KEY or PREFECT_API_AUTH_STRING"
        return "failed", f"{server} answers {error.code} to /health: is PREFECT_API_URL right? It ends in /api"
    except OSError as error:
        return "failed", f"{server} does not answer ({getattr(error, 'reason', error)}): {cure}"
    return "ok", f"{server} answers"


def store_probe(uri: str | None) -> Answer:
    """Write conditionally, read back and delete, in the store itself."""
    store = open_store(uri)
    began = time.monotonic()
    broken = [promise.name for promise in promises_of(store.backend) if not promise.kept]
    if broken:
        return "failed", f"{store.uri} cannot hold a store, which needs storage that {' and '.join(broken)}"
    return "ok", f"{store.uri} wrote, refused to overwrite, read and deleted in {time.monotonic() - began:.2f} s"


# ---------------------------------------------------------------- secrets: present or not, never shown


def discreet(check: Check) -> Answer:
    """Run a check that reads secrets: an error of a library may quote one, so only its type is shown."""
    try:
        return check()
    except Exception as error:
        return "warning", f"cannot be read ({type(error).__name__}); check the file or variable"


def hub_credentials() -> Answer:
    from huggingface_hub import get_token

    if get_token():
        where = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the Hub's token file"
        return "ok", f"present ({where})"
    return "ok", "none: public models and data only; HF_TOKEN or `hf auth login` for private and gated ones"


def netrc_file() -> Path:
    """The file where W&B and others keep passwords of servers."""
    return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()


def aws_file() -> Path:
    """The file where AWS's tools keep keys."""
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()


def wandb_credentials() -> Answer:
    import netrc

    if os.environ.get("WANDB_API_KEY"):
        return "ok", "present (WANDB_API_KEY)"
    file = netrc_file()
    named = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    hosts = {named} if named else {"api.forge.coreweave.com", "api.wandb.ai"}  # the latter before wandb 0.31
    if file.is_file() and hosts & netrc.netrc(str(file)).hosts.keys():
        return "ok", f"present ({file.name})"
    return "ok", "none: set WANDB_API_KEY or run `wandb login` to send runs there"


def aws_credentials() -> Answer:
    given = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if os.environ.get(name)]
    if len(given) == 1:
        return "warning", f"{given[0]} is set without its other half: set both"
    others = ("AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    named = given or [name for name in others if os.environ.get(name)]
    file = aws_file()
    if named or file.is_file():
        return "ok", f"present ({', '.join(named) or 'the shared credentials file'})"
    return "ok", "none"


def proxies() -> Answer:
    """Only the names of variables: a proxy's address may hold a password."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    given = [name for wanted in names for name in (wanted, wanted.lower()) if os.environ.get(name)]
    if not given:
        return "ok", "none"
    return "ok", f"{', '.join(given)}, but not for 127.0.0.1"
