"""Which texts on this machine are secret: what variables whose names say so hold, and the files where tools keep credentials.

What the name of a secret looks like, :mod:`alignment_core.credentials` says.
"""

from __future__ import annotations

import configparser
import netrc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from alignment_core.credentials import LEAST, SETTINGS, looks_secret, variables
from alignment_core.doctor.environment import aws_file, netrc_file

LARGEST_FILE = 1 << 16
_USERINFO = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/]+)@")


def secret_values(environ: Mapping[str, str], recipe: Mapping[str, Any]) -> set[str]:
    """Every secret that this process can find out, as it may occur in a text.

    ``recipe`` names variables of its own that hold tokens, as ``env:NAME`` or ``token_variable``.
    """
    found = set(_of_environment(environ, {name for _, name in variables(recipe)}))
    for source in (_of_hub, _of_netrc, _of_aws):
        found |= set(_survived(source))
    return {part for value in found for part in _parts(value) if len(part) >= LEAST and part.lower() not in SETTINGS}


def _of_environment(environ: Mapping[str, str], named: set[str]) -> Iterator[str]:
    for name, value in environ.items():
        yield from (unquote(part) for match in _USERINFO.findall(value) for part in (match, match.partition(":")[2]))
        yield from (match.partition(":")[2] for match in _USERINFO.findall(value))
        is_file = value.startswith(("/", "~")) and len(value) < 4096 and _is_file(Path(value))
        if name in named or (looks_secret(name) and not is_file):
            yield value
        elif is_file and (looks_secret(name) or looks_secret(re.sub(r"(?i)_(FILE|PATH)$", "", name))):
            with suppress(OSError, UnicodeDecodeError):  # RAY_AUTH_TOKEN_PATH, MY_KEY_FILE
                yield from _small(Path(value).expanduser())


def _is_file(path: Path) -> bool:
    with suppress(OSError, RuntimeError):
        return path.expanduser().exists()
    return False


def _small(path: Path) -> Iterator[str]:
    if path.is_file() and path.stat().st_size <= LARGEST_FILE:
        yield path.read_text()


def _of_hub() -> Iterable[str]:
    from huggingface_hub import get_token

    return filter(None, [get_token()])


def _of_netrc() -> Iterable[str]:
    file = netrc_file()
    hosts = netrc.netrc(str(file)).hosts.values() if file.is_file() else ()
    return [password for *_, password in hosts if password]


def _of_aws() -> Iterable[str]:
    keys = configparser.RawConfigParser()
    keys.read(aws_file())
    return [value for section in keys.values() for name, value in section.items() if looks_secret(name)]


def _survived(source: Callable[[], Iterable[str]]) -> list[str]:
    """What a source gives; nothing if its file is broken: whatever reads it fails on it, too."""
    with suppress(Exception):
        return list(source())
    return []


def _parts(value: str) -> Iterator[str]:
    """A secret whole; without the name before it, of ``name:password``; and its lines, of a key in PEM."""
    yield value.strip()
    name, colon, password = value.strip().partition(":")
    if colon and "\n" not in value and "/" not in name:
        yield password
    yield from (line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and "-----" not in line)
