"""Secrets: references to them in recipes, names and shapes that reveal them, and their removal from texts.

A recipe is copied to many places (journal, records of the store, Prefect's database, W&B, attestations on the Hub), so it must
hold no secret: :func:`refuse_literals` names the fields that do, before anything is written. ``env:NAME`` stands for the value
of an environment variable. Every copy, and every stage's key, has the name; the process that uses the value reads it with
:func:`resolved`. :func:`cut` removes secrets from the texts of others, such as errors of libraries and of the user's code, and
records of earlier versions: values that :func:`resolved` read, and texts of the shape of a secret.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from alignment_core.errors import UserError

REMOVED = "<removed>"
LEAST = 4
"""Shorter values are not removed: they protect nothing, and occur everywhere."""
LONG = 8
"""Secrets of at least so many characters are removed inside longer words, too."""
SETTINGS = {
    "true", "false", "none", "null", "auto", "token", "basic", "bearer", "default", "empty", "dummy", "not-needed", "no-key",
}  # fmt: skip
"""Values that are settings or placeholders in a field of any name."""
_ENDS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "CREDENTIAL", "AUTHORIZATION"),
    *("APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY", "AUTHKEY"),
)
_WORDS = {"AUTH", "PAT", "WEBHOOK", "COOKIE", "COOKIES", "BEARER", "JWT", "SECRETS", "PASSWORDS"}
_LAST_WORDS = {"KEY", "PASS"}
"""Words that mark a secret only at the end of a name, unlike in ``key_parts`` and ``pass_at``."""
_NO_SECRETS = {
    "COUNT", "DIR", "ENABLED", "FILE", "HOST", "LIMIT", "METHOD", "MODE", "NAME", "PATH", "SOCK", "TIMEOUT", "TTL", "TYPE",
    "URI", "URL", "USER", "USERNAME", "VARIABLE",
}  # fmt: skip
"""Last words of names that do not mean a secret, although another word in them may."""
_OF_DATA = {
    "ANSWER", "CACHE", "COLUMN", "COMPLETION", "CONTENT", "DATA", "DATASET", "FOREIGN", "GROUP", "ID", "IMAGE", "INDEX",
    "INPUT", "INSTRUCTION", "JSON", "LABEL", "MESSAGE", "MESSAGES", "OUTPUT", "PRIMARY", "PROMPT", "QUESTION", "RESPONSE",
    "REWARD", "ROLE", "SORT", "TASK", "TEXT", "VALUE",
}  # fmt: skip
"""Words before ``key`` in names of keys of rows, such as ``prompt_key``."""
_COUNTED = re.compile(r"(?i)(token|key|pass|auth)s?$")
_NUMERIC = re.compile(r"(?i)(secret|passw(or)?d|passphrase|credential|pwd)s?(_?\d+)?$")
"""Names of counts and places, and of secrets that may be numbers: a number behind another name with a secret word, such as
``token_budget``, is not a secret."""
_PLURALS = re.compile(r"(API|ACCESS|AUTH|HF|BEARER|REFRESH)_(KEYS|TOKENS)$")
_OF_A_VOCABULARY = re.compile(r"(?i)(eos|bos|pad|unk|sep|cls|mask|image|special|stop|next|per)[_-]token$")

_REFERENCE = re.compile(r"((?i:bearer |basic |token )?)env:([A-Za-z_]\w*)((?:/.*)?)", re.DOTALL)
_IN_QUERY = re.compile(r"(?<==)env:([A-Za-z_]\w*)(?=[&#]|$)")
_BEGINS = "env:"

_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_USERINFO = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)[^\s/'\"<>]{1,512}@")
_PASSWORD_IN_URL = re.compile(
    r"(?i)[a-z][a-z0-9+.-]{0,30}://(?:[^\s/'\"<>:@]{0,512}:[^\s/'\"<>@]+|[^\s/'\"<>:@]{20,512})@"
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[opsur]_[A-Za-z0-9]{16,}"
    r"|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[abeprs]-[\w-]{10,}|\bpn[bu]_[A-Za-z0-9]{16,}|\bwandb_v\d+_\w{16,}"
    r"|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|(?<=hooks\.slack\.com/services/)[\w/-]+"
)
_HEADER = re.compile(
    r"(?i)(\bauthorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:[a-z]{1,12} +)?|\bbearer +)([\w.~+/=-]{6,})"
)
_BEARER = re.compile(r"(?i)\b(?:bearer|basic) +(?=[\w.~+/=-]*[\d=])[\w.~+/=-]{12,}")
_NETRC = re.compile(r"(?i)(\blogin\s+\S{1,200}\s+password\s+)()(\S+)")
_QUERY = re.compile(r"([?&])([\w.%-]{1,60})=([^&\s\"'<>#\\]+)")
_NAMES = (
    r"((?:[a-z0-9]{1,30}[_.-]){0,6}[a-z0-9]{0,30}?"
    r"(?:passwords?|passwd|passphrase|secrets?|api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key|auth[_-]?string"
    r"|credentials?|token))"
)
_ASSIGNED = re.compile(
    rf"(?i)(?<![a-z0-9]){_NAMES}(\\?[\"']?\s{{0,3}}[:=]\s{{0,3}}\\?[\"']?)([^\s\"'\\,;&(){{}}\[\]<>]+)"
)
_OPTION = re.compile(rf"(?i)(?<![a-z0-9]){_NAMES}(=)([^\s\"'\\,;&(){{}}\[\]<>]+)")
_QUERY_NAMES = re.compile(
    r"(?i)token(?!iz|s)|secret|password|passwd|signature|credential|\bsig\b|(?:^|[_-])(?:api|access)?[_-]?key|auth(?!or)"
)
_PLACEHOLDER = re.compile(r"<[^>]*>|\[/?[A-Z_]*\]|\$?\{[^}]*\}|\W+")

_read: set[str] = set()
"""Values that this process has read with ``resolved``, or got by ``remember``."""


def looks_secret(name: str) -> bool:
    """Whether a variable or a field of this name holds a secret: ``WANDB_API_KEY``, ``password``, ``accessKey``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    words = [word for word in re.split(r"[^A-Z0-9]+", snake) if word]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] == "ID"):  # MY_TOKEN_2, AWS_ACCESS_KEY_ID
        words.pop()
    if not words or words[-1] in _NO_SECRETS or words == ["KEY"] or _OF_A_VOCABULARY.search(name):
        return False
    if words[-1] == "KEY" and words[-2] in _OF_DATA:
        return False
    named = words[-1] in _LAST_WORDS or any(word in _WORDS or word.endswith(_ENDS) for word in words)
    return named or name == "pwd" or bool(re.search(r"(?i)[a-z0-9]_PWD$", name) or _PLURALS.search("_".join(words)))


def resolved(content: Any, field: str) -> Any:
    """Plain data with the value of the variable for each ``env:NAME``, and for each ``?query=env:NAME`` of a URL.

    ``env:NAME/path`` is a path below the URL that the variable holds, ``Bearer env:NAME`` the header of a request. Raises
    UserError, beginning with ``field``, for a variable that is not set.
    """
    if isinstance(content, Mapping):
        return {name: resolved(value, f"{field}.{name}") for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [resolved(value, f"{field}.{number}") for number, value in enumerate(content)]
    if not isinstance(content, str) or _BEGINS not in content:
        return content
    if whole := _REFERENCE.fullmatch(content):
        return whole[1] + with_path(_value_of(whole[2], field), whole[3])
    if "://" in content:
        return _IN_QUERY.sub(lambda match: quote(_value_of(match[1], field), safe=""), content)
    return content


def _value_of(name: str, field: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UserError(f"{field}: the environment has no variable {name}")
    remember(value)
    return value


def remember(*values: str) -> None:
    """Have ``cut`` remove these values in this process."""
    _read.update(value for value in values if len(value) >= LEAST and value.lower() not in SETTINGS)


def remember_variables(content: Any) -> None:
    """The same for the values of the variables that plain data, such as a recipe, names."""
    remember(*filter(None, (os.environ.get(name) for _, name in variables(content))))


def with_path(url: str, path: str) -> str:
    """``path`` below ``url``: before its query, if there is one."""
    if not path:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path.lstrip('/')}"))


def is_reference(text: str) -> bool:
    """Whether it is ``env:NAME``, or a path below the URL that such a variable holds."""
    return text.startswith(_BEGINS) and _REFERENCE.fullmatch(text) is not None


def variables(content: Any) -> Iterator[tuple[str, str]]:
    """Field and name of each variable that plain data refers to: ``env:NAME``, and ``token_variable`` of a server."""
    for field, name, text in _texts(content):
        if name == "token_variable":
            yield field, text
        elif whole := _REFERENCE.fullmatch(text):
            yield field, whole[2]
        elif "://" in text:
            yield from ((field, variable) for variable in _IN_QUERY.findall(text))


def _texts(content: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, str]]:
    """Field, last name and text of all texts of plain data."""
    if isinstance(content, Mapping):
        for inner, value in content.items():
            yield from _texts(value, f"{path}.{inner}" if path else str(inner), str(inner))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _texts(value, f"{path}.{number}" if path else str(number), name)
    elif isinstance(content, str):
        yield path, name, content


def refuse_literals(content: Any, origin: str = "") -> None:
    """Raise UserError with a line for each field of plain data that holds a secret itself; lines begin with ``origin``."""
    prefix = f"{origin}: " if origin else ""
    lines = [
        f"{prefix}{field}: holds a secret, and what is configured is written to the run's journal, the store, Prefect's "
        "database and trackers: put it into an environment variable and write `env:NAME`, in a URL `?name=env:NAME`"
        for field in literals(content)
    ]
    if lines:
        raise UserError("\n".join(lines))


def literals(content: Any) -> list[str]:
    """The fields of plain data that hold a secret itself: by their names, or by the shape of their texts."""
    fields: list[str] = []
    of_environment = _of_environment()

    def named(field: str, value: Any) -> Any:
        if _is_literal(value) and not _names_a_key(field.rpartition(".")[2], value):
            fields.append(field)
        return value

    def text(field: str, value: str) -> Any:
        if _has_literal(value) or any(secret in value for secret in of_environment):
            fields.append(field)
        return value

    map_texts(content, text, named)
    return list(dict.fromkeys(fields))


def _of_environment() -> list[str]:
    """Long values of variables with the name of a secret, except paths."""
    return [
        value
        for name, value in os.environ.items()
        if looks_secret(name) and len(value) >= 12 and not value.startswith(("/", "~"))
    ]


def _is_literal(value: Any) -> bool:
    """Whether the value behind the name of a secret is one, and not a placeholder."""
    if isinstance(value, str):
        return len(value) >= LEAST and value.lower() not in SETTINGS and not _PLACEHOLDER.fullmatch(value)
    return abs(value) >= 10 ** (LEAST - 1)


def _names_a_key(name: str, value: Any) -> bool:
    """Whether a word stands where a key is named, as in ``reward_fn_key: data_source``, or in a list, as in
    ``stop: [password, login]``."""
    is_key = name.isdigit() or (
        name.upper().endswith("_KEY") and not re.sub("[^A-Z0-9]", "", name.upper()).endswith(_ENDS)
    )
    return is_key and isinstance(value, str) and re.fullmatch("[a-z]+(_[a-z]+)*", value) is not None


def _has_literal(text: str) -> bool:
    if any(shape.search(text) for shape in (_KEY_BLOCK, _SHAPES, _PASSWORD_IN_URL, _BEARER)):
        return True
    if "://" in text and any(_query(match) != match[0] for match in _QUERY.finditer(text)):
        return True
    return any(len(match[3]) >= LEAST and _assigned(match) != match[0] for match in _OPTION.finditer(text))


def map_texts(
    content: Any,
    text: Callable[[str, str], Any],
    named: Callable[[str, Any], Any],
    field: str = "",
    secret: bool = False,
    name: str = "",
    key_text: Callable[[str], str] = str,
) -> Any:
    """Plain data with ``text(field, value)`` for each text, and ``named(field, value)`` for each text or number with a secret's
    name: that of its field or of one above, or of the header or variable of which it is the ``value``. Names become
    ``key_text(name)``."""

    def inner(value: Any, step: Any, secret: bool, name: str) -> Any:
        return map_texts(value, text, named, f"{field}.{step}" if field else str(step), secret, name, key_text)

    if isinstance(content, Mapping):
        title = next((content[key] for key in ("name", "key", "header") if isinstance(content.get(key), str)), "")
        items = {}
        for key, value in content.items():
            says_so = looks_secret(title if key == "value" and title else str(key))
            items[key_text(str(key))] = inner(
                value, key, says_so or (secret and key.upper() not in _NO_SECRETS), str(key)
            )
        return items
    if isinstance(content, list | tuple):
        is_header = len(content) == 2 and isinstance(content[0], str) and looks_secret(content[0]) and not secret
        if is_header:
            return [content[0], inner(content[1], 1, True, content[0])]
        return [inner(value, number, secret, name) for number, value in enumerate(content)]
    if isinstance(content, str):
        if secret and content and not _REFERENCE.fullmatch(content):
            return named(field, content)
        return text(field, content)
    is_number = isinstance(content, int | float) and not isinstance(content, bool)
    if secret and is_number and not _COUNTED.search(name) and (_NUMERIC.search(name) or not looks_secret(name)):
        return named(field, content)
    return content


class Cutter:
    """Removes secrets from texts: ``values`` in every spelling that a file may have, texts of the shape of a secret, and values
    behind the name of one. ``count`` is the number of removals.

    With ``sentences``, a word without a digit behind ``password: `` stays, because our own errors begin so.
    """

    def __init__(self, values: Iterable[str] = (), sentences: bool = False) -> None:
        self.count = 0
        self._assigned = _assigned_in_sentence if sentences else _assigned
        self._values = _alternatives(form for value in set(values) for form in spellings(value))

    def text(self, text: str) -> str:
        """A text without secrets."""
        for pattern in (_KEY_BLOCK, self._values):
            text = self._sub(pattern, text)
        text = self._sub(_USERINFO, text, lambda match: f"{match[1]}{REMOVED}@")
        text = self._sub(_SHAPES, text)
        text = self._sub(_HEADER, text, lambda match: f"{match[1]}{REMOVED}")
        text = self._sub(_NETRC, text, lambda match: f"{match[1]}{REMOVED}")
        text = self._sub(_QUERY, text, _query)
        return self._sub(_ASSIGNED, text, self._assigned)

    def plain(self, content: Any) -> Any:
        """Plain data without secrets."""
        return map_texts(content, lambda _, text: self.text(text), self.field)

    def field(self, field: str, value: Any) -> str:
        """The replacement of the value of a field whose name is that of a secret."""
        self.count += 1
        return REMOVED

    def _sub(self, pattern: re.Pattern[str], text: str, change: Callable[[re.Match[str]], str] | None = None) -> str:
        def changed(match: re.Match[str]) -> str:
            new = change(match) if change else REMOVED
            self.count += new != match[0]
            return new

        return pattern.sub(changed, text)


def cut(content: Any) -> Any:
    """A text, or plain data, without secrets that this process read, and without texts of the shape of one."""
    cutter = _cutter(frozenset(_read))
    return cutter.text(content) if isinstance(content, str) else cutter.plain(content)


@functools.lru_cache(maxsize=4)
def _cutter(values: frozenset[str]) -> Cutter:
    return Cutter(values, sentences=True)


def _query(match: re.Match[str]) -> str:
    named = _QUERY_NAMES.search(match[2]) or looks_secret(match[2])
    is_secret = named and not match[3].startswith(_BEGINS) and match[3] != REMOVED
    return f"{match[1]}{match[2]}={REMOVED}" if is_secret else match[0]


def _assigned(match: re.Match[str]) -> str:
    """Remove any value of ``password=…``; behind ``token:`` only long ones with a digit, because a word of a sentence may
    follow, or the name of a token of a vocabulary."""
    name, between, value = match.groups()
    if value.startswith(_BEGINS):
        return match[0]
    if name.lower().endswith("token"):
        is_secret = looks_secret(name) and len(value) >= 16 and any(letter.isdigit() for letter in value)
    else:
        is_secret = value.lower() not in ("none", "null", "true", "false")
    return f"{name}{between}{REMOVED}" if is_secret else match[0]


def _assigned_in_sentence(match: re.Match[str]) -> str:
    is_prose = match[2].endswith(": ") and not any(letter.isdigit() for letter in match[3])
    return match[0] if is_prose else _assigned(match)


def spellings(secret: str) -> Iterator[str]:
    """The spellings of a text in JSON, Python, a URL, HTML, and the header of a request."""
    yield from (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
    yield from (quote(secret, safe=""), quote(secret), html.escape(secret))
    if len(secret) >= LONG:
        yield b64encode(secret.encode(errors="replace")).decode().rstrip("=")


def _bounded(spelling: str) -> str:
    escaped = re.escape(spelling)
    return escaped if len(spelling) >= LONG else rf"(?<![A-Za-z0-9_]){escaped}(?![A-Za-z0-9_])"


def _alternatives(spellings: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest spelling that fits; without spellings, nothing."""
    longest_first = sorted(set(spellings), key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(_bounded, longest_first)) or "(?!)")
