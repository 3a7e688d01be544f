"""Cutting out of a text what a stranger must not read: secrets, home folders, names of the user and the machine, rows.

Two nets: the values that are secret on this machine (:mod:`.secret_values`), in every spelling that a file may have of
them; and what has the shape of a secret, or stands behind a name that says so, wherever it came from.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alignment_core.credentials import REMOVED, Cutter, map_texts

SECRET, HOME, ALIGN_HOME, USER, HOST, ROW = REMOVED, "~", "$ALIGN_HOME", "<user>", "<host>", "<text of a row>"
COMMON = {
    "admin", "align", "alignment", "app", "container", "data", "debian", "docker", "ec2-user", "jovyan", "localhost", "model",
    "nobody", "prefect", "ray", "root", "runner", "test", "train", "ubuntu", "user", "vllm", "worker", "workspace",
}  # fmt: skip
"""Names of accounts and machines that say nothing about anybody; to cut out such words would spoil the rest."""

_QUOTED_ROW = re.compile(
    r"\b(for the prompt|gave|returned) (\"(?:[^\"\\\n]|\\.)*(?:\"|$)|'(?:[^'\\\n]|\\.)*(?:'|$))", re.MULTILINE
)
"""How :mod:`alignment_core.rewards` and the checks quote a row, or what was answered to it."""
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
        self._secrets = Cutter(secrets)
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
        before = self._secrets.count
        text = self._secrets.text(text)
        self.cut["secrets"] += self._secrets.count - before
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
        return map_texts(content, lambda _, text: self.text(text), self._field, key_text=self.text)

    def _field(self, _: str, value: Any) -> Any:
        self.cut["secrets"] += 1
        return SECRET

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


def _folders(paths: Iterable[Path]) -> list[str]:
    """Folders as a file may name them; the root of the file system is nobody's home."""
    spelled = {form for path in paths for form in (str(path.absolute()), str(path.resolve()))}
    return [form for name in spelled if len(name) > 1 for form in (name, json.dumps(name)[1:-1], quote(name))]
