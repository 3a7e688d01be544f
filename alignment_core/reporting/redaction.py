"""Texts for readers elsewhere: without secrets, home folders, names of the user and the machine, and rows."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from alignment_core.credentials import LEAST, REMOVED, SETTINGS, Cutter, looks_secret, map_texts, spellings, variables
from alignment_core.doctor.environment import aws_file, netrc_file

SECRET, HOME, ALIGN_HOME, USER, HOST, ROW = REMOVED, "~", "$ALIGN_HOME", "<user>", "<host>", "<text of a row>"
COMMON = {
    "admin", "align", "alignment", "app", "container", "data", "debian", "docker", "ec2-user", "jovyan", "localhost", "model",
    "nobody", "prefect", "ray", "root", "runner", "test", "train", "ubuntu", "user", "vllm", "worker", "workspace",
}  # fmt: skip
"""Common names of accounts and machines, which identify nobody and may be ordinary words of the text."""

_QUOTED_ROW = re.compile(
    r"\b(for the prompt|gave|returned) (?:\"(?:[^\"\\\n]|\\.)*(?:\"|$)|'(?:[^'\\\n]|\\.)*(?:'|$))", re.MULTILINE
)
"""A row, or an answer to one, as errors of rewards and checks quote it."""
_HOMES = re.compile(r"(?<![\w.~}-])/(?:(?:home|Users)/[^/\s\"'\\:,;)\]}>]+|root(?![\w-]|\.\w))")
_USERINFO = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/]+)@")
_PAIRS = re.compile(r"(?<![\w.-])([\w.-]+)(?=(?:[ \t]*[=:][ \t]*|\s+)(\S+))")
"""Names and values, as .netrc and AWS's credentials file have them: each word with the next one."""


class Redactor:
    """Replaces private texts; ``cut`` counts the replacements by kind.

    Args: ``secrets`` are values; ``align_home`` and ``homes`` folders; ``users`` and ``hosts`` names. With ``rows``, texts of
    rows stay.
    """

    def __init__(
        self,
        secrets: Iterable[str],
        align_home: Path,
        homes: Iterable[Path],
        users: Iterable[str],
        hosts: Iterable[str],
        rows: bool,
    ) -> None:
        self.cut = Counter[str]()
        self._secrets = Cutter(secrets)
        folders = {**dict.fromkeys(homes, HOME), align_home: ALIGN_HOME}
        spelled = {
            form: place
            for folder, place in folders.items()
            for path in {folder.absolute(), folder.resolve()} - {Path("/")}
            for form in spellings(str(path))
        }
        names = {**dict.fromkeys(users, USER), **dict.fromkeys(hosts, HOST)}
        self._rules = [] if rows else [(_QUOTED_ROW, rf"\1 {ROW}", "rows")]
        for form in sorted(spelled, key=len, reverse=True):
            self._rules.append((re.compile(rf"{re.escape(form)}(?![\w-]|\.\w)"), spelled[form], "home folders"))
        self._rules.append((_HOMES, HOME, "home folders"))
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 1 and name.lower() not in COMMON:
                pattern = re.compile(rf"(?i)(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])")
                self._rules.append((pattern, names[name], "names"))

    def text(self, text: str) -> str:
        """A text with replacements."""
        text = self._secrets.text(text)
        self.cut["secrets"] = self._secrets.count
        for pattern, replacement, kind in self._rules:
            text, count = pattern.subn(replacement, text)
            self.cut[kind] += count
        return text

    def markup(self, text: str) -> str:
        """The same for SVG, where a replacement must not look like a tag."""
        text = self.text(text)
        for place in (SECRET, USER, HOST, ROW):
            text = text.replace(place, html.escape(place))
        return text

    def plain(self, content: Any) -> Any:
        """The same for plain data: for each text in it, and for the whole value of a field whose name is that of a secret."""
        content = map_texts(content, lambda _, text: self.text(text), self._secrets.field, key_text=self.text)
        self.cut["secrets"] = self._secrets.count
        return content


def secret_values(environ: Mapping[str, str], recipe: Mapping[str, Any]) -> set[str]:
    """Every secret of this machine that this process can find: variables, and files where tools keep credentials.

    ``recipe`` may name variables that hold secrets: ``env:NAME``.
    """
    values: list[str] = []
    named = {name for _, name in variables(recipe)}
    for name, value in environ.items():
        values += [text for userinfo in _USERINFO.findall(value) for text in (userinfo, unquote(userinfo))]
        text = _text(Path(value)) if value.startswith(("/", "~")) else ""
        if text and looks_secret(re.sub(r"(?i)_(FILE|PATH)$", "", name)):  # RAY_AUTH_TOKEN_PATH, MY_KEY_FILE
            values.append(text)
        elif name in named or looks_secret(name):
            values.append(value)
    for file in (netrc_file(), aws_file()):
        values += [value for name, value in _PAIRS.findall(_text(file)) if looks_secret(name)]
    with suppress(Exception):  # a broken file of the Hub's client, which fails on it, too
        from huggingface_hub import get_token

        values.append(get_token() or "")
    return {part for value in values for part in _parts(value) if len(part) >= LEAST and part.lower() not in SETTINGS}


def _text(path: Path) -> str:
    """The text of a small file; empty without one."""
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        file = path.expanduser()
        if file.is_file() and file.stat().st_size < 1 << 16:  # opening a pipe would block
            return file.read_text()
    return ""


def _parts(value: str) -> Iterator[str]:
    """A secret; the password of ``name:password``; the lines of a key in PEM."""
    yield value.strip()
    name, colon, password = value.strip().partition(":")
    if colon and "\n" not in value and "/" not in name:
        yield password
    yield from (line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and "-----" not in line)
