"""Cutting out of a text what a stranger must not read: secrets, home folders, names of the user and the machine, rows.

Two nets: the values that are secret on this machine (:mod:`.secret_values`), in every spelling that a file may have of
them; and what has the shape of a secret, or stands behind a name that says so, wherever it came from.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alignment_core.reporting.secret_values import looks_secret

SECRET, HOME, ALIGN_HOME, USER, HOST, ROW = "<removed>", "~", "$ALIGN_HOME", "<user>", "<host>", "<text of a row>"
LONG = 8
"""From so many characters on, a secret is cut out inside a longer word, too."""
COMMON = {
    "admin", "align", "alignment", "app", "container", "data", "debian", "docker", "ec2-user", "jovyan", "localhost", "model",
    "nobody", "prefect", "ray", "root", "runner", "test", "train", "ubuntu", "user", "vllm", "worker", "workspace",
}  # fmt: skip
"""Names of accounts and machines that say nothing about anybody; to cut out such words would spoil the rest."""

_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_USERINFO = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)[^\s/'\"<>]{1,512}@")
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}"
    r"|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[abeprs]-[\w-]{10,}|\bpn[bu]_[A-Za-z0-9]{16,}|\bwandb_v\d+_\w{16,}"
    r"|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|(?<=hooks\.slack\.com/services/)[\w/-]+"
)
_HEADER = re.compile(
    r"(?i)(\bauthorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:[a-z]{1,12} +)?|\bbearer +)([\w.~+/=-]{6,})"
)
_NETRC = re.compile(r"(?i)(\blogin\s+\S{1,200}\s+password\s+)()(\S+)")
_QUERY = re.compile(r"([?&])([\w.%-]{1,60})=([^&\s\"'<>#\\]+)")
_ASSIGNED = re.compile(
    r"(?i)(?<![a-z0-9])((?:[a-z0-9]{1,30}[_.-]){0,6}[a-z0-9]{0,30}?"
    r"(?:passwords?|passwd|passphrase|secrets?|api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key|auth[_-]?string"
    r"|credentials?|token))"
    r"(\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?)([^\s\"'\\,;&(){}\[\]<>]+)"
)
_QUOTED_ROW = re.compile(
    r"\b(for the prompt|gave|returned) (\"(?:[^\"\\\n]|\\.)*(?:\"|$)|'(?:[^'\\\n]|\\.)*(?:'|$))", re.MULTILINE
)
"""How :mod:`alignment_core.rewards` and the checks quote a row, or what was answered to it."""
_QUERY_NAMES = re.compile(
    r"(?i)token|secret|password|passwd|signature|credential|\bsig\b|(?:^|[_-])(?:api|access)?[_-]?key|auth"
)
_PLACES = (
    (SECRET, "secrets"),
    (ALIGN_HOME, "home folders"),
    (HOME, "home folders"),
    (USER, "names"),
    (HOST, "names"),
    (ROW, "rows"),
)
_WHAT = dict(_PLACES)


class Redactor:
    """Knows what to cut out; ``cut`` counts what it did, by kind.

    Args: ``secrets`` are values; ``align_home`` and ``homes`` folders; ``users`` and ``hosts`` names. ``rows`` says that
    texts of rows may stay.
    """

    def __init__(
        self,
        secrets: Iterable[str] = (),
        align_home: Path | None = None,
        homes: Iterable[Path] = (),
        users: Iterable[str] = (),
        hosts: Iterable[str] = (),
        rows: bool = False,
    ) -> None:
        self.cut: Counter[str] = Counter()
        self._rows = rows
        self._secrets = _alternatives(_bounded(spelling) for secret in set(secrets) for spelling in _spellings(secret))
        of_align = _folders([align_home] if align_home else [])
        folders = {**dict.fromkeys(_folders(homes), HOME), **dict.fromkeys(of_align, ALIGN_HOME)}
        self._folders = [
            (re.compile(rf"{re.escape(folder)}(?![\w-]|\.\w)"), place)
            for folder, place in sorted(folders.items(), key=lambda one: -len(one[0]))
        ] + [(re.compile(r"(?<![\w.~}-])/(?:(?:home|Users)/[^/\s\"'\\:,;)\]}>]+|root(?![\w-]|\.\w))"), HOME)]
        self._names = [
            (re.compile(rf"(?i)(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])"), place)
            for names, place in ((hosts, HOST), (users, USER))
            for name in sorted(set(names), key=len, reverse=True)
            if len(name) > 1 and name.lower() not in COMMON
        ]

    def text(self, text: str) -> str:
        """A text without what must not be in it."""
        for pattern in (_KEY_BLOCK, self._secrets):
            text = self._sub(pattern, SECRET, text)
        text = self._sub(_USERINFO, SECRET, text, lambda found: f"{found[1]}{SECRET}@")
        text = self._sub(_SHAPES, SECRET, text)
        text = self._sub(_HEADER, SECRET, text, lambda found: f"{found[1]}{SECRET}")
        text = self._sub(_NETRC, SECRET, text, lambda found: f"{found[1]}{SECRET}")
        text = self._sub(_QUERY, SECRET, text, _query)
        text = self._sub(_ASSIGNED, SECRET, text, _assigned)
        if not self._rows:
            text = self._sub(_QUOTED_ROW, ROW, text, lambda found: f"{found[1]} {ROW}")
        for pattern, place in (*self._folders, *self._names):
            text = self._sub(pattern, place, text)
        return text

    def markup(self, text: str) -> str:
        """The same for SVG, where what stands for the cut must not look like a tag."""
        text = self.text(text)
        for place in (SECRET, USER, HOST, ROW):
            text = text.replace(place, html.escape(place))
        return text

    def plain(self, content: Any) -> Any:
        """The same for plain data: each text in it, and all of a field whose name says that it is secret."""
        if isinstance(content, dict):
            return {self.text(str(name)): self._field(str(name), value) for name, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.plain(value) for value in content]
        return self.text(content) if isinstance(content, str) else content

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value and looks_secret(name):
            self.cut["secrets"] += 1
            return SECRET
        return self.plain(value)

    def _sub(
        self,
        pattern: re.Pattern[str],
        place: str,
        text: str,
        change: Callable[[re.Match[str]], str] | None = None,
    ) -> str:
        def changed(found: re.Match[str]) -> str:
            new = change(found) if change else place
            self.cut[_WHAT[place]] += new != found[0]
            return new

        return pattern.sub(changed, text)


def _query(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}={SECRET}" if _QUERY_NAMES.search(found[2]) else found[0]


def _assigned(found: re.Match[str]) -> str:
    """``password=…`` goes in any case; behind ``token:`` a word of a sentence may stand, or the name of a token of a
    vocabulary."""
    name, between, value = found.groups()
    if name.lower().endswith("token"):
        is_secret = looks_secret(name) and len(value) >= 16 and any(letter.isdigit() for letter in value)
    else:
        is_secret = value.lower() not in ("none", "null", "true", "false")
    return f"{name}{between}{SECRET}" if is_secret else found[0]


def _spellings(secret: str) -> Iterator[str]:
    """A text as it may be written in JSON, Python, a URL, HTML, or in the header of a request."""
    yield from (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
    yield from (quote(secret, safe=""), quote(secret), html.escape(secret))
    if len(secret) >= LONG:
        yield b64encode(secret.encode(errors="replace")).decode().rstrip("=")


def _bounded(spelling: str) -> str:
    escaped = re.escape(spelling)
    return escaped if len(spelling) >= LONG else rf"(?<![A-Za-z0-9_]){escaped}(?![A-Za-z0-9_])"


def _alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    """One of them, the longest that fits; with none, what never occurs."""
    return re.compile("|".join(sorted(set(patterns), key=lambda one: (-len(one), one))) or "(?!)")


def _folders(paths: Iterable[Path]) -> list[str]:
    """Folders as a file may name them; the root of the file system is nobody's home."""
    spelled = {form for path in paths for form in (str(path.absolute()), str(path.resolve()))}
    return [form for name in spelled if len(name) > 1 for form in (name, json.dumps(name)[1:-1], quote(name))]
