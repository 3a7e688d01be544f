"""What our processes do on the network by default: this machine takes no proxy, and no library reports that it is used."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

DIRECT = ("127.0.0.1", "localhost", "::1", "169.254.169.254", "169.254.170.2")
"""This machine, and where AWS keeps credentials of its machines and containers: no proxy reaches these, or may see them."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = ("NO_PROXY", "no_proxy")
"""Both spellings: some libraries read one, some the other, and some prefer one where both are set."""
UNTRACKED = {"DO_NOT_TRACK": "1"}
"""What Prefect, vLLM and the Hub's client read; Ray's own is in :mod:`alignment_core.cluster.ray_cluster`. What the user sets
wins."""


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``environment`` lacks, or has without this machine's addresses: what our own servers and their clients
    need where a proxy is set, and what keeps libraries from reporting their use."""
    found = {name: value for name, value in UNTRACKED.items() if name not in environment}
    if any(environment.get(spelling) for name in PROXIES for spelling in (name, name.upper())):
        given = [environment[name] for name in NO_PROXY if environment.get(name)]
        for name in NO_PROXY:
            hosts = [
                host.strip() for host in environment.get(name, given[0] if given else "").split(",") if host.strip()
            ]
            if "*" not in hosts:
                found[name] = ",".join([*hosts, *(host for host in DIRECT if host not in hosts)])
    return {name: value for name, value in found.items() if environment.get(name) != value}


def prepare() -> None:
    """Set these in this process, before a library reads them, and so in all that it starts."""
    os.environ.update(defaults(os.environ))


def without_proxy() -> dict[str, str]:
    """What this process, once it is prepared, says of addresses that take no proxy; nothing where no proxy is set."""
    given = any(os.environ.get(spelling) for name in PROXIES for spelling in (name, name.upper()))
    return {name: os.environ[name] for name in NO_PROXY if given and name in os.environ}


def proxy_of(url: str) -> str | None:
    """The proxy through which requests for ``url`` go; None without one."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or urllib.request.proxy_bypass(parts.hostname or "") else proxy


def through_proxy(url: str) -> str:
    """For a message about ``url``: which proxy the request went through, without its password; empty without one."""
    proxy = urlsplit(proxy_of(url) or "")
    return f" through the proxy {proxy.hostname}:{proxy.port or 80}" if proxy.hostname else ""
