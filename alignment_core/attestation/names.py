"""Standard spellings of packages, repositories on the Hugging Face Hub, and times."""

from __future__ import annotations

import re
from urllib.parse import quote


def package_url(name: str, version: str) -> str:
    """The purl of a package on PyPI, such as ``pkg:pypi/torch@2.13.0%2Bcpu``."""
    return f"pkg:pypi/{quote(re.sub(r'[-_.]+', '-', name).lower())}@{quote(version, safe='.')}"


def hub_uri(name: str, commit: str, is_data: bool) -> str:
    """As huggingface_hub's file system writes a repository at a commit: ``hf://datasets/org/name@commit``."""
    return f"hf://{'datasets/' if is_data else ''}{name}@{commit}"


def hub_package_url(name: str, commit: str) -> str:
    """The purl of a model on the Hub, such as ``pkg:huggingface/org/name@commit``."""
    return f"pkg:huggingface/{quote(name, safe='/.-_')}@{commit}"


def commit_in(address: str) -> str | None:
    """The commit that an address of a file on the Hub names."""
    match = re.match(r"hf://[^@]+@([0-9a-f]{40})(/|$)", address)
    return match[1] if match else None


def sha256_of(version: str) -> str | None:
    """The digest that stands as the version of a file at an address whose server says none."""
    return version.removeprefix("sha256:") if version.startswith("sha256:") else None


def file_at(address: str, version: str) -> str:
    """A file at an address in one version, as one name."""
    return f"{address}#{quote(version, safe=':')}"


def utc(time: str) -> str:
    """A time of a record as RFC 3339 with the letter Z, which in-toto asks for."""
    return time.replace("+00:00", "Z")
