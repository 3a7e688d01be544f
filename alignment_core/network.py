"""Network defaults of our processes: no proxy for this machine's own addresses, and no usage reports of libraries."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

DIRECT = ("127.0.0.1", "localhost", "::1", "169.254.169.254", "169.254.170.2")
"""This machine, and the addresses of credentials on AWS's machines and in its containers: a proxy cannot reach them, and must
not see them."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = ("NO_PROXY", "no_proxy")
"""Both spellings: some libraries read one, some the other, and some prefer one if both are set."""
UNTRACKED = {"DO_NOT_TRACK": "1"}
"""Read by Prefect, vLLM and the Hub's client; Ray's own is in :mod:`alignment_core.cluster.ray_cluster`. The user's settings
take precedence."""


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Values for variables that ``environment`` lacks, or has without this machine's addresses: our own servers and their
    clients need them if a proxy is set, and they keep libraries from reporting their use."""
    values = {name: value for name, value in UNTRACKED.items() if name not in environment}
    if any(environment.get(spelling) for name in PROXIES for spelling in (name, name.upper())):
        given = [environment[name] for name in NO_PROXY if environment.get(name)]
        for name in NO_PROXY:
            hosts = [
                host.strip() for host in environment.get(name, given[0] if given else "").split(",") if host.strip()
            ]
            if "*" not in hosts:
                values[name] = ",".join([*hosts, *(host for host in DIRECT if host not in hosts)])
    return {name: value for name, value in values.items() if environment.get(name) != value}


def prepare() -> None:
    """Set these in this process, before a library reads them, and for all processes that it starts."""
    os.environ.update(defaults(os.environ))


def without_proxy() -> dict[str, str]:
    """The variables for addresses without a proxy, once this process is prepared; none if no proxy is set."""
    given = any(os.environ.get(spelling) for name in PROXIES for spelling in (name, name.upper()))
    return {name: os.environ[name] for name in NO_PROXY if given and name in os.environ}


def proxy_of(url: str) -> str | None:
    """The proxy through which requests for ``url`` go; None without one."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy is None or urllib.request.proxy_bypass(parts.hostname or "") else proxy


def through_proxy(url: str) -> str:
    """For a message about ``url``: the proxy of the request, without its password; empty without one."""
    proxy = urlsplit(proxy_of(url) or "")
    return f" through the proxy {proxy.hostname}:{proxy.port or 80}" if proxy.hostname else ""
